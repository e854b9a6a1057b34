"""Converts a simulated engine's shards of rows to the equal intervals of the flattened tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import TypeVar

from shardproof.engine.contract import Shard
from shardproof.harness.records.observation import Observation

MaybeShard = TypeVar("MaybeShard", bound=Shard | None)


def flattened(observation: Observation) -> Observation:
    """Return the same observation in flat pieces, but for losses and buffers."""
    steps = tuple(
        replace(seen, gradients=_flattened(seen.gradients), parameters=_flattened(seen.parameters))
        for seen in observation.steps
    )
    return replace(
        observation,
        initial=_flattened(observation.initial),
        steps=steps,
        optimizer_state=_flattened(observation.optimizer_state),
    )


def _flattened(shards: Mapping[str, MaybeShard]) -> dict[str, MaybeShard]:
    return {
        name: shard if shard is None or not shard.offsets else flat(shard)  # type: ignore[misc]  # a Shard stays one
        for name, shard in shards.items()
    }


def flat(shard: Shard) -> Shard:
    row = prod(shard.global_shape[1:])
    return Shard.flat(shard.tensor.flatten().clone(), shard.offsets[0] * row, shard.global_shape)
