"""What one rank saw, as plain values; how it is kept as a file and read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.contract import Shard
from harness.errors import UsageError
from harness.ledger.entry import Ledger

__all__ = ["Observation", "StepObservation", "load_observation", "save_observation"]

Shards = Mapping[str, Shard]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepObservation:
    """One optimizer step on one rank.

    ``losses``: this rank's loss of each microbatch, float64 scalars on the scale of the global mean times
    the world size. ``gradients``: after the last backward, before the optimizer step; None where the engine
    has none. ``parameters``: after the optimizer step.
    """

    losses: tuple[float, ...]
    gradients: Mapping[str, Shard | None]
    parameters: Shards


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observation:
    """One rank of one training: parameters after prepare, each step, state and buffers at the end, ledger.

    ``input_digest`` is a hash of every input the rank was given, so that equal data on two ranks shows.
    """

    rank: int
    input_digest: str
    initial: Shards
    steps: tuple[StepObservation, ...]
    optimizer_state: Shards
    buffers: Shards
    ledger: Ledger


def save_observation(observation: Observation, path: Path) -> None:
    """Write all but the ledger, which is kept as its own JSON lines beside it."""
    plain = {
        "rank": observation.rank,
        "input_digest": observation.input_digest,
        "initial": _pack(observation.initial),
        "steps": [
            {"losses": s.losses, "gradients": _pack(s.gradients), "parameters": _pack(s.parameters)}
            for s in observation.steps
        ],
        "optimizer_state": _pack(observation.optimizer_state),
        "buffers": _pack(observation.buffers),
    }
    torch.save(plain, path)


def load_observation(path: Path, ledger: Ledger) -> Observation:
    """Read what `save_observation` wrote; raises UsageError for a missing or truncated file."""
    try:
        # weights_only: a run directory may come from elsewhere and must not be able to run code.
        plain = torch.load(path, weights_only=True)
    except Exception as error:  # torch raises a different type for each way in which a file can be broken
        raise UsageError(
            f"observation {path}",
            expected="a complete file",
            got=f"{type(error).__name__}: {error}",
            hint="running the case again",
        ) from error
    return Observation(
        rank=plain["rank"],
        input_digest=plain["input_digest"],
        initial=_unpack(plain["initial"]),
        steps=tuple(
            StepObservation(
                losses=tuple(s["losses"]),
                gradients=_unpack_optional(s["gradients"]),
                parameters=_unpack(s["parameters"]),
            )
            for s in plain["steps"]
        ),
        optimizer_state=_unpack(plain["optimizer_state"]),
        buffers=_unpack(plain["buffers"]),
        ledger=ledger,
    )


# Any: the plain dicts that torch.save and torch.load exchange.
def _pack(shards: Mapping[str, Shard | None]) -> dict[str, Any]:
    return {
        name: None if s is None else (s.tensor, list(s.offsets), list(s.global_shape))
        for name, s in shards.items()
    }


def _unpack_optional(plain: dict[str, Any]) -> dict[str, Shard | None]:
    return {
        name: None
        if packed is None
        else Shard(tensor=packed[0], offsets=tuple(packed[1]), global_shape=tuple(packed[2]))
        for name, packed in plain.items()
    }


def _unpack(plain: dict[str, Any]) -> dict[str, Shard]:
    return {name: shard for name, shard in _unpack_optional(plain).items() if shard is not None}
