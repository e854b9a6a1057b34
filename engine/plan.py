"""What we ask of an engine for one case: layout, communication units, policies. Values only."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from enum import Enum

import torch

from engine.capability import Capability, UnsupportedError

__all__ = ["Accumulation", "Axis", "Grouping", "Layout", "Plan", "Replicas", "Reshard"]


class Layout(Enum):
    """How parameters lie on the ranks."""

    NATIVE = "whatever the engine does on a 1-D mesh"
    REPLICATE = "every rank holds every parameter"
    SHARD = "every rank holds its share of every parameter"
    HYBRID = "replicas, each sharded over its share of the ranks; Replicas says how many"


class Replicas(Enum):
    """How many replicas a hybrid layout has; with n ranks, which mesh (replicate, shard) that is."""

    ONE = "(1, n): one, sharded over all ranks; nobody else holds what a rank holds"
    TWO = "(2, n / 2): two, each sharded over half of the ranks"
    PAIRS = "(n / 2, 2): each pair of ranks is one, sharded over the two"
    SINGLES = "(n, 1): each rank is one, and holds everything"


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
    parameters; ``grouping`` says whether the engine is free to ignore them. ``replicas`` is for
    ``Layout.HYBRID`` alone. ``reduce_dtype`` is the dtype in which gradients cross between ranks; None means
    the parameters' own. ``divide_factor`` is what the sum of gradients over ranks is divided by; None means
    the number of ranks.
    """

    layout: Layout = Layout.NATIVE
    replicas: Replicas = Replicas.TWO
    units: tuple[str, ...] = ()
    grouping: Grouping = Grouping.HINT
    reshard: Reshard = Reshard.NATIVE
    accumulation: Accumulation = Accumulation.EVERY_MICROBATCH
    reduce_dtype: torch.dtype | None = None
    divide_factor: float | None = None

    def __post_init__(self) -> None:
        if self.layout is not Layout.HYBRID and self.replicas is not Replicas.TWO:
            raise ValueError(
                f"Plan.replicas: expected Layout.HYBRID beside {self.replicas}, got {self.layout}; "
                "try layout=Layout.HYBRID"
            )
        if self.divide_factor is not None and not 0 < self.divide_factor < math.inf:
            raise ValueError(
                f"Plan.divide_factor: expected a positive number, got {self.divide_factor}; "
                "try None to divide by the number of ranks"
            )

    def axes(self, world_size: int) -> tuple[Axis, ...]:
        """Give the mesh axes for ``world_size`` ranks; raises ValueError when the layout does not divide it."""
        if self.layout is not Layout.HYBRID:
            return (Axis(name="data", size=world_size),)
        is_halved = self.replicas in {Replicas.TWO, Replicas.PAIRS}
        if is_halved and world_size % 2:
            raise ValueError(
                f"Layout.HYBRID with {self.replicas}: expected an even world size, got {world_size}; "
                f"try --world threads:{world_size + 1}, or Replicas.ONE or SINGLES, which any size allows"
            )
        num_replicas = {
            Replicas.ONE: 1,
            Replicas.TWO: 2,
            Replicas.PAIRS: world_size // 2,
            Replicas.SINGLES: world_size,
        }[self.replicas]
        return (
            Axis(name="replicate", size=num_replicas),
            Axis(name="shard", size=world_size // num_replicas),
        )

    def divisor(self, world_size: int) -> float:
        """Give what the sum of gradients over ``world_size`` ranks is divided by."""
        return world_size if self.divide_factor is None else self.divide_factor

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
            Capability.GRADIENT_DIVIDE: self.divide_factor is not None,
        }
        return frozenset(c for c, is_wanted in wanted.items() if c is not None and is_wanted)

    def refuse_beyond(self, declared: Set[Capability]) -> None:
        """Raise UnsupportedError when this plan needs more than ``declared``: an adapter's first line."""
        missing = self.needs - declared
        if missing:
            raise UnsupportedError(sorted(missing, key=lambda c: c.name))
