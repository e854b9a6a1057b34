"""What a rank's memory tracker reports: intervals of unsharded storage, and live bytes at each moment of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

from shardproof.harness.tracing.ledger import Phase


class MemoryKind(StrEnum):
    """What memory is for, inferred from all that happened to it."""

    SHARDED = (
        "sharded"  # the optimizer's parameters: this rank's share, or the whole where nothing is sharded
    )
    GATHERED = "gathered"  # whole parameters, or a larger part of them than the share
    STAGING = "staging"  # what collectives are packed into or unpacked from, and nothing else
    GRADIENT = "gradient"  # gradients that are still to be reduced
    REDUCED = "reduced"  # gradients that are reduced
    OPTIMIZER = "optimizer"  # what the optimizer step makes
    USER = (
        "user"  # the training loop's own tensors, buffers, and parameters that the engine is to leave alone
    )
    OTHER = "other"  # activations, and what comes and goes with them


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One piece of memory from event ``born`` on, until it was given back at event ``died``; None: never.

    ``unit`` is the unit of the plan whose parameters or gradients are in it, ``""`` the root; None where that is
    unknown, or several. Where a storage is resized one life ends and another begins.
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
    """Where the training loop stood from event ``start`` until the next stretch."""

    start: int
    phase: Phase
    step: int
    microbatch: int
    unit: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UserTensor:
    """A tensor of the user's, of which the watch saw that it changed its memory; ``change`` is empty if not."""

    name: str
    num_bytes: int
    change: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LifetimeReport:
    """One rank's memory over a training: lives in the order of their births, and stretches in that of time."""

    num_events: int
    num_collectives: int
    lives: tuple[Allocation, ...] = ()
    stretches: tuple[LoopSpan, ...] = ()
    user_tensors: tuple[UserTensor, ...] = ()


def report_to_json(report: LifetimeReport) -> dict[str, Any]:
    """Return the report in JSON's own types; there are thousands of lives, so they go without the names of fields."""
    return {
        "num_events": report.num_events,
        "num_collectives": report.num_collectives,
        "lives": [list(astuple(life)) for life in report.lives],
        "stretches": [list(astuple(stretch)) for stretch in report.stretches],
        "user_tensors": [asdict(tensor) for tensor in report.user_tensors],
    }


# Any: JSON.
def report_from_json(plain: Mapping[str, Any]) -> LifetimeReport:
    """Read what `report_to_json` gave."""
    return LifetimeReport(
        num_events=plain["num_events"],
        num_collectives=plain["num_collectives"],
        lives=tuple(_lives(plain["lives"])),
        stretches=tuple(_stretches(plain["stretches"])),
        user_tensors=tuple(UserTensor(**tensor) for tensor in plain["user_tensors"]),
    )


def _lives(plain: list[Any]) -> Iterator[Allocation]:
    for kind, unit, num_bytes, born, died, operator, site in plain:
        yield Allocation(
            kind=MemoryKind(kind),
            unit=unit,
            num_bytes=num_bytes,
            born=born,
            died=died,
            operator=operator,
            site=site,
        )


def _stretches(plain: list[Any]) -> Iterator[LoopSpan]:
    for start, phase, step, microbatch, unit in plain:
        yield LoopSpan(start=start, phase=Phase(phase), step=step, microbatch=microbatch, unit=unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySnapshot:
    """One event: where the loop stood, and all that was alive once it was over."""

    event: int
    place: LoopSpan
    alive: tuple[Allocation, ...]

    def num_bytes(self, kinds: tuple[MemoryKind, ...]) -> int:
        """Add up what is alive of these kinds."""
        return sum(life.num_bytes for life in self.alive if life.kind in kinds)

    def units(self, kind: MemoryKind) -> frozenset[str]:
        """Return the units that have memory of a kind, as far as they are known."""
        return frozenset(life.unit for life in self.alive if life.kind is kind and life.unit is not None)

    def __str__(self) -> str:
        """Format where the loop stood."""
        place = self.place
        microbatch = [f"microbatch {place.microbatch}"] if place.microbatch >= 0 else []
        turn = [] if place.unit is None else [f"turn of {_spell(place.unit)}"]
        return ", ".join([f"step {place.step}", *microbatch, str(place.phase), *turn])


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The events from when the loop came to a unit until it went on; ``unit`` is None outside of all."""

    place: LoopSpan
    moments: tuple[MemorySnapshot, ...]


def moments(
    report: LifetimeReport,
    where: Callable[[LoopSpan], bool],
    kinds: tuple[MemoryKind, ...] = tuple(MemoryKind),
) -> Iterator[MemorySnapshot]:
    """Yield the events of the stretches asked for, with what is alive of these kinds."""
    for turn in turns(report, where, kinds):
        yield from turn.moments


def turns(
    report: LifetimeReport,
    where: Callable[[LoopSpan], bool],
    kinds: tuple[MemoryKind, ...] = tuple(MemoryKind),
) -> Iterator[Turn]:
    """Yield the stretches asked for, each with its events."""
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
    """Format bytes by whatever they were counted by, the most first."""
    return ", ".join(f"{name} {num_bytes}" for name, num_bytes in Counter(alive).most_common())


def _alive(lives: list[Allocation], event: int) -> Iterator[Allocation]:
    return (life for life in lives if life.born <= event and (life.died is None or event < life.died))


def _spell(unit: str) -> str:
    return f"unit {unit!r}" if unit else "the root"
