"""What was alive when, from a report: bytes by kind and whose they were, event by event. Pure; no torch here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from harness.tracing.ledger import Phase
from harness.tracing.memory.report import Allocation, Kind, LifetimeReport, Stretch

__all__ = ["Moment", "Turn", "moments", "spell_bytes", "turns"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One event: where the loop stood, and all that was alive once it was over."""

    event: int
    place: Stretch
    alive: tuple[Allocation, ...]

    def num_bytes(self, kinds: tuple[Kind, ...]) -> int:
        """Add up what is alive of these kinds."""
        return sum(life.num_bytes for life in self.alive if life.kind in kinds)

    def units(self, kind: Kind) -> frozenset[str]:
        """Give the units that have memory of a kind, as far as they are known."""
        return frozenset(life.unit for life in self.alive if life.kind is kind and life.unit is not None)

    def __str__(self) -> str:
        """Spell where the loop stood."""
        place = self.place
        microbatch = [f"microbatch {place.microbatch}"] if place.microbatch >= 0 else []
        turn = [] if place.unit is None else [f"turn of {_spell(place.unit)}"]
        return ", ".join([f"step {place.step}", *microbatch, str(place.phase), *turn])


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The events from when the loop came to a unit until it went on; ``unit`` is None outside of all."""

    place: Stretch
    moments: tuple[Moment, ...]


def moments(
    report: LifetimeReport, where: Callable[[Stretch], bool], kinds: tuple[Kind, ...] = tuple(Kind)
) -> Iterator[Moment]:
    """Give the events of the stretches asked for, with what is alive of these kinds."""
    for turn in turns(report, where, kinds):
        yield from turn.moments


def turns(
    report: LifetimeReport, where: Callable[[Stretch], bool], kinds: tuple[Kind, ...] = tuple(Kind)
) -> Iterator[Turn]:
    """Give the stretches asked for, each with its events."""
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
                Moment(event=event, place=stretch, alive=tuple(_alive(here, event)))
                for event in range(start, stop)
            ),
        )


def last_of(report: LifetimeReport, step: int, microbatch: int, phase: Phase) -> Moment | None:
    """Give the last event of a phase in a step and microbatch (-1: outside of all); None if there was none."""
    found = None
    for turn in turns(report, lambda s: (s.step, s.microbatch, s.phase) == (step, microbatch, phase)):
        found = turn.moments[-1]
    return found


def spell_bytes(alive: Mapping[str, int]) -> str:
    """Spell bytes by whatever they were counted by, the most first."""
    return ", ".join(f"{name} {num_bytes}" for name, num_bytes in Counter(alive).most_common())


def _alive(lives: list[Allocation], event: int) -> Iterator[Allocation]:
    return (life for life in lives if life.born <= event and (life.died is None or event < life.died))


def _spell(unit: str) -> str:
    return f"unit {unit!r}" if unit else "the root"
