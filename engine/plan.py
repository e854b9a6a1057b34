"""What we ask of an engine for one case: layout, communication units, policies. Values only."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from enum import Enum

import torch

from engine.capability import Capability, UnsupportedError

__all__ = ["Accumulation", "Axis", "Grouping", "Layout", "Plan", "Reshard"]


class Layout(Enum):
    """How parameters lie on the ranks."""

    NATIVE = "whatever the engine does on a 1-D mesh"
    REPLICATE = "every rank holds every parameter"
    SHARD = "every rank holds its share of every parameter"
    HYBRID = "two replicas, each sharded over half of the ranks"


class Reshard(Enum):
    """What becomes of gathered parameters between forward and backward."""

    NATIVE = "the engine's default"
    AFTER_FORWARD = "freed after forward, gathered again for backward"
    KEEP = "kept from forward to backward"


class Accumulation(Enum):
    """When gradients of several microbatches are communicated."""

    EVERY_MICROBATCH = "after each microbatch"
    LAST_MICROBATCH = "once, after the last microbatch"


class Grouping(Enum):
    """How binding the units of a plan are."""

    HINT = "an engine that groups differently still trains the same model"
    REQUIRED = "each unit is one communication group, the root takes the rest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of the device mesh: its name and how many ranks lie along it."""

    name: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One request to an engine.

    ``units`` names the submodules that each form one communication group; the root takes the remaining
    parameters; ``grouping`` says whether the engine is free to ignore them. ``reduce_dtype`` is the dtype in
    which gradients cross between ranks; None means the parameters' own.
    """

    layout: Layout = Layout.NATIVE
    units: tuple[str, ...] = ()
    grouping: Grouping = Grouping.HINT
    reshard: Reshard = Reshard.NATIVE
    accumulation: Accumulation = Accumulation.EVERY_MICROBATCH
    reduce_dtype: torch.dtype | None = None

    def axes(self, world_size: int) -> tuple[Axis, ...]:
        """Give the mesh axes for ``world_size`` ranks; raises ValueError when the layout does not divide it."""
        if self.layout is not Layout.HYBRID:
            return (Axis(name="data", size=world_size),)
        if world_size % 2:
            raise ValueError(
                f"Layout.HYBRID: expected an even world size (two replicas), got {world_size}; "
                f"try --world threads:{world_size + 1}"
            )
        return (Axis(name="replicate", size=2), Axis(name="shard", size=world_size // 2))

    @property
    def needs(self) -> frozenset[Capability]:
        """The capabilities without which this plan cannot be honoured."""
        layout = {
            Layout.NATIVE: None,
            Layout.REPLICATE: Capability.REPLICATE,
            Layout.SHARD: Capability.SHARD,
            Layout.HYBRID: Capability.HYBRID,
        }[self.layout]
        wanted = {
            layout: layout is not None,
            Capability.UNITS: self.grouping is Grouping.REQUIRED,
            Capability.RESHARD_POLICY: self.reshard is not Reshard.NATIVE,
            Capability.ACCUMULATE: self.accumulation is Accumulation.LAST_MICROBATCH,
            Capability.REDUCE_DTYPE: self.reduce_dtype is not None,
        }
        return frozenset(c for c, is_wanted in wanted.items() if c is not None and is_wanted)

    def refuse_beyond(self, declared: Set[Capability]) -> None:
        """Raise UnsupportedError when this plan needs more than ``declared``: an adapter's first line."""
        missing = self.needs - declared
        if missing:
            raise UnsupportedError(sorted(missing, key=lambda c: c.name))
