"""The reports on a rank's memory: lifetimes by kind, live bytes at each moment of a step, and the count of a census."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from shardproof.harness.tracing.ledger import Phase


class MemoryKind(StrEnum):
    """The use of memory, inferred from all that happened to it."""

    SHARDED = (
        "sharded"  # the optimizer's parameters: this rank's share, or the whole where nothing is sharded
    )
    GATHERED = "gathered"  # whole parameters, or a larger part of them than the share
    STAGING = "staging"  # buffers that only pack or unpack collectives
    GRADIENT = "gradient"  # gradients that are not reduced yet
    REDUCED = "reduced"  # reduced gradients
    OPTIMIZER = "optimizer"  # made by the optimizer step
    USER = (
        "user"  # the training loop's own tensors, buffers, and parameters that the engine is to leave alone
    )
    OTHER = "other"  # activations, and memory that comes and goes with them


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One piece of memory from event ``born`` on, until its release at event ``died``; None: never released.

    ``unit`` is the unit of the plan whose parameters or gradients it contains, ``""`` the root. It is None where that
    is unknown, or several. Where a storage is resized one life ends and another begins.
    """

    kind: MemoryKind
    unit: str | None
    num_bytes: int
    born: int
    died: int | None
    operator: str
    site: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSpan:
    """The training loop's position from event ``start`` until the next stretch."""

    start: int
    phase: Phase
    step: int
    microbatch: int
    unit: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTensor:
    """A tensor of the user's; ``change`` describes a change of its memory that the watch saw, empty if none."""

    name: str
    num_bytes: int
    change: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LifetimeReport:
    """One rank's memory over a training: lives in the order of birth, and stretches in the order of time."""

    num_events: int
    num_collectives: int
    lives: tuple[Allocation, ...] = ()
    stretches: tuple[LoopSpan, ...] = ()
    user_tensors: tuple[UserTensor, ...] = ()


ROWS: frozenset[type] = frozenset({Allocation, LoopSpan})
"""What is written without the names of its fields: there are thousands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySnapshot:
    """One event: the loop's position, and all memory that was live after it."""

    event: int
    place: LoopSpan
    alive: tuple[Allocation, ...]

    def num_bytes(self, kinds: tuple[MemoryKind, ...]) -> int:
        """Add up the live bytes of these kinds."""
        return sum(life.num_bytes for life in self.alive if life.kind in kinds)

    def units(self, kind: MemoryKind) -> frozenset[str]:
        """Return the known units that have memory of a kind."""
        return frozenset(life.unit for life in self.alive if life.kind is kind and life.unit is not None)

    def __str__(self) -> str:
        """Format the loop's position."""
        place = self.place
        microbatch = [f"microbatch {place.microbatch}"] if place.microbatch >= 0 else []
        turn = [] if place.unit is None else [f"turn of {_spell(place.unit)}"]
        return ", ".join([f"step {place.step}", *microbatch, str(place.phase), *turn])


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The events from the loop's entry into a unit until it went on; ``unit`` is None outside of all units."""

    place: LoopSpan
    moments: tuple[MemorySnapshot, ...]


def moments(
    report: LifetimeReport,
    where: Callable[[LoopSpan], bool],
    kinds: tuple[MemoryKind, ...] = tuple(MemoryKind),
) -> Iterator[MemorySnapshot]:
    """Yield the events of the requested stretches, with the live memory of these kinds."""
    for turn in turns(report, where, kinds):
        yield from turn.moments


def turns(
    report: LifetimeReport,
    where: Callable[[LoopSpan], bool],
    kinds: tuple[MemoryKind, ...] = tuple(MemoryKind),
) -> Iterator[Turn]:
    """Yield the requested stretches, each with its events."""
    lives = [life for life in report.lives if life.kind in kinds]
    end = report.num_events + 1
    bounds = [stretch.start for stretch in report.stretches] + [end]
    for stretch, (start, stop) in zip(report.stretches, pairwise(bounds), strict=True):
        if not where(stretch):
            continue
        here = [life for life in lives if life.born < stop and (life.died is None or life.died > start)]
        yield Turn(
            place=stretch,
            moments=tuple(
                MemorySnapshot(event=event, place=stretch, alive=tuple(_alive(here, event)))
                for event in range(start, stop)
            ),
        )


def last_of(report: LifetimeReport, step: int, microbatch: int, phase: Phase) -> MemorySnapshot | None:
    """Return the last event of a phase in a step and microbatch (-1: outside of all); None if there was none."""
    found = None
    for turn in turns(report, lambda s: (s.step, s.microbatch, s.phase) == (step, microbatch, phase)):
        found = turn.moments[-1]
    return found


def spell_bytes(alive: Mapping[str, int]) -> str:
    """Format bytes by their keys, the most first."""
    return ", ".join(f"{name} {num_bytes}" for name, num_bytes in Counter(alive).most_common())


def _alive(lives: list[Allocation], event: int) -> Iterator[Allocation]:
    return (life for life in lives if life.born <= event and (life.died is None or event < life.died))


def _spell(unit: str) -> str:
    return f"unit {unit!r}" if unit else "the root"


class CensusTime(StrEnum):
    """When the memory was counted."""

    FILLING = "while the model was filled"
    BETWEEN = "between two microbatches"
    REDUCED = "after the last backward"
    STEPPED = "after the optimizer step"
    CLEARED = "after zero_grad"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStorage:
    """One storage: its bytes now, and the shape, operator and call site of the first tensor seen in it."""

    num_bytes: int
    shape: tuple[int, ...]
    operator: str
    site: str
    device: str = "cpu"

    def __str__(self) -> str:
        where = "" if self.device == "cpu" else f" on {self.device}"
        return (
            f"{self.num_bytes} bytes{where} of shape {list(self.shape)} from {self.operator} at {self.site}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CensusEntry:
    """All memory that a rank holds at one moment of a step, and the largest pieces of it.

    ``state_bytes`` is the optimizer state that the engine reported, before the first update; None after it.
    ``shown`` is a digest of the names of the gradients and the optimizer state that the engine showed; empty between
    microbatches, where gradients may wait for their reduction unshown. ``num_loads`` loads of a state were before.
    ``left_bytes`` are those once that was read, and ``since`` the largest pieces that were not alive, or not as many,
    at the earlier count since the same load with the same digest and the fewest of them, if this one has more.
    ``process_bytes`` is the growth of its process since before the model was built, observations excluded. It is None
    where it was not requested, or where ranks share a process. ``device_bytes`` are those on an accelerator.
    """

    step: int
    moment: CensusTime
    num_bytes: int
    largest: tuple[LiveStorage, ...]
    process_bytes: int | None = None
    device_bytes: int = 0
    state_bytes: int | None = None
    shown: str = ""
    num_loads: int = 0
    left_bytes: int = 0
    since: tuple[LiveStorage, ...] = ()
