"""The laws of where shards lie: on the dim that the plan asks for, and with optimizer state no larger than they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from engine.contract import Placement, Shard
from harness.laws.law import Evidence, Ruling, rule

__all__ = ["LiesOnTheDimAskedFor", "StateLiesWithItsParameter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiesOnTheDimAskedFor:
    """Every shard of every parameter and gradient is whole in all dims but the one of the plan's placement.

    Numbers cannot show this: an engine that shards another dim still trains the same model.
    """

    name: str = "lies on the dim asked for"

    def judge(self, evidence: Evidence) -> Ruling:
        """Look at every rank, before training and after every step."""
        placement = evidence.training.plan.placement
        broken = [
            f"{where}: expected shards of {list(shard.global_shape)} along dim {_dim(shard, placement)}, "
            f"got {'a flat one' if shard.is_flat else list(shard.tensor.shape)}"
            for where, shard in _shards(evidence)
            if shard.is_flat or not _lies_along(shard, _dim(shard, placement))
        ]
        return rule(self.name, broken, held=f"{placement.value} on {evidence.world_size} ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLiesWithItsParameter:
    """Optimizer state of a parameter's shape is held as the parameter is: the same piece, on every rank."""

    name: str = "optimizer state lies with its parameter"

    def judge(self, evidence: Evidence) -> Ruling:
        """Look at every rank's state at the end."""
        broken = []
        num_seen = 0
        for observation in evidence.ranks:
            for name, state in observation.optimizer_state.items():
                parameter = observation.initial.get(name.partition("/")[0])
                if parameter is None or state.global_shape != parameter.global_shape:
                    continue
                num_seen += 1
                if (state.offsets, state.tensor.shape) != (parameter.offsets, parameter.tensor.shape):
                    broken.append(
                        f"rank {observation.rank}, {name}: expected {list(parameter.tensor.shape)} at "
                        f"{list(parameter.offsets)}, got {list(state.tensor.shape)} at {list(state.offsets)}"
                    )
        if not num_seen:
            broken.append(
                "expected optimizer state of some parameter's shape, got none: nothing was observed"
            )
        return rule(self.name, broken, held=f"{num_seen} tensors on {evidence.world_size} ranks")


def _shards(evidence: Evidence) -> Iterator[tuple[str, Shard]]:
    for observation in evidence.ranks:
        groups: list[tuple[str, Mapping[str, Shard | None]]] = [("before training", observation.initial)]
        for step, seen in enumerate(observation.steps):
            groups += [
                (f"step {step}, gradient", seen.gradients),
                (f"step {step}, parameter", seen.parameters),
            ]
        for where, shards in groups:
            yield from (
                (f"rank {observation.rank}, {where} {name!r}", shard)
                for name, shard in shards.items()
                if shard is not None
            )


def _dim(shard: Shard, placement: Placement) -> int:
    shape = shard.global_shape
    return 0 if placement is Placement.FIRST else shape.index(max(shape))


def _lies_along(shard: Shard, dim: int) -> bool:
    local = tuple(shard.tensor.shape)
    others = [d for d in range(len(local)) if d != dim]
    return all((shard.offsets[d], local[d]) == (0, shard.global_shape[d]) for d in others)
