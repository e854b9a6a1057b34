"""The timeline of a world, from the files in its folder: unit computation, collectives in flight, and races.

Read from the ranks' journals and race reports, however the world ended. No torch here: reports draw it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from shardproof.harness.records.manifest import MANIFEST, changes
from shardproof.harness.regular_file import read_regular
from shardproof.harness.tracing.codec import UNREADABLE, decode
from shardproof.harness.tracing.events import EventKind, EventLog, collectives_in_flight, compute_spans
from shardproof.harness.tracing.journal import read_journal
from shardproof.harness.tracing.ledger import Entry, Op, Phase
from shardproof.harness.tracing.races.race_report import RACES, Race, RaceReport, Touch

COMPUTE = "compute"
"""The lane of what computes: the default stream, and the host without a watch over streams."""

_JOURNAL = re.compile(r"rank(\d+)\.ledger\.jsonl")
_DEFAULT_STREAM = "the default stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePoint:
    """When something happened: the clock, and its position in the rank's journal."""

    at_ns: int
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpan:
    """A stretch of time in which a unit computes, or the loop is in a phase, which has no unit."""

    unit: str | None
    phase: Phase
    step: int
    microbatch: int
    first: TimePoint
    last: TimePoint

    @property
    def name(self) -> str:
        return str(self.phase) if self.unit is None else self.unit or "root"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSpan:
    """One collective from its issue to the first wait of the compute stream; ``landed`` is None if there was no wait.

    ``lane`` is the stream on which it was issued if streams were watched, else its group.
    """

    entry: Entry
    lane: str
    issued: TimePoint
    landed: TimePoint | None

    @property
    def key(self) -> tuple[tuple[int, ...], int] | None:
        """The key of the same collective on every rank of its group; None for a message, which has one peer."""
        return None if self.entry.op in {Op.SEND, Op.RECV} else (self.entry.group, self.entry.group_seq)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceMark:
    """A race, with the lanes and times of its two accesses."""

    race: Race
    lanes: tuple[str, str]
    first: TimePoint
    second: TimePoint


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimeline:
    """One rank: its lanes from top to bottom, and their contents."""

    rank: int
    lanes: tuple[str, ...]
    phases: tuple[UnitSpan, ...]
    unit_spans: tuple[UnitSpan, ...]
    collectives: tuple[CollectiveSpan, ...]
    races: tuple[RaceMark, ...]

    def of_step(self, step: int) -> RankTimeline:
        """Keep the spans that began in one step; a race is in the step of its second access."""
        return replace(
            self,
            phases=tuple(s for s in self.phases if s.step == step),
            unit_spans=tuple(s for s in self.unit_spans if s.step == step),
            collectives=tuple(p for p in self.collectives if p.entry.step == step),
            races=tuple(c for c in self.races if c.race.second.step == step),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All ranks of one world, or some of them; ``problems`` lists damaged files, whose content is missing here."""

    ranks: tuple[RankTimeline, ...]
    problems: tuple[str, ...] = ()

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the steps of the timeline; spans before the first step belong to none."""
        return tuple(sorted({p.step for r in self.ranks for p in (*r.phases, *r.unit_spans) if p.step >= 0}))

    @property
    def step_to_report(self) -> int | None:
        """Return the most informative step: the one with the most first races, else the last."""
        raced = Counter(c.race.second.step for r in self.ranks for c in r.races)
        return max(self.steps, key=lambda step: (raced[step], step), default=None)

    def of_step(self, step: int) -> Timeline:
        return replace(self, ranks=tuple(rank.of_step(step) for rank in self.ranks))

    def of_ranks(self, keep: Callable[[int], bool]) -> Timeline:
        """Keep some ranks."""
        return replace(self, ranks=tuple(r for r in self.ranks if keep(r.rank)))


def read_timeline(folder: Path) -> Timeline:
    """Read the timeline of one world; it has no ranks if there are no journals, or if they contain no events."""
    found = sorted((int(m[1]), p) for p in folder.glob("rank*.jsonl") if (m := _JOURNAL.fullmatch(p.name)))
    problems = _changed(folder)
    ranks = [_read_rank(rank, journal, problems) for rank, journal in found]
    texts = tuple(f"{name}: {why}" for name, why in sorted(problems.items()))
    return Timeline(ranks=tuple(rank for rank in ranks if rank is not None), problems=texts)


def _changed(folder: Path) -> dict[str, str]:
    """List the files that changed since they were saved; a world that was not saved completely has no manifest."""
    if not (folder / MANIFEST).is_file():
        return {}
    return dict(changes(folder, lambda name: name.endswith((".ledger.jsonl", RACES))))


def _read_rank(rank: int, journal: Path, problems: dict[str, str]) -> RankTimeline | None:
    ledger, events, damaged = read_journal(journal)
    if damaged:
        problems[journal.name] = f"{len(damaged)} damaged line(s) skipped, the first in line {damaged[0]}"
    if not events:
        return None
    collectives = tuple(_collectives(events, {entry.seq: entry for entry in ledger}))
    lanes = tuple(dict.fromkeys((COMPUTE, *(p.lane for p in collectives))))
    races = _races_in(journal.with_name(f"rank{rank}{RACES}"), events, lanes, problems)
    touched = (lane for mark in races for lane in mark.lanes)
    return RankTimeline(
        rank=rank,
        lanes=tuple(dict.fromkeys((*lanes, *touched))),
        phases=tuple(_phases(events)),
        unit_spans=tuple(_unit_spans(events)),
        collectives=collectives,
        races=races,
    )


def _races_in(
    file: Path, events: EventLog, lanes: tuple[str, ...], problems: dict[str, str]
) -> tuple[RaceMark, ...]:
    """Read a race report; a damaged one is left out, because a part of it would seem to clear the rest."""
    if file.name in problems or not file.is_file():
        return ()
    try:
        races = decode(RaceReport, json.loads(read_regular(file))).races
        return tuple(_race_mark(race, events, lanes) for race in races)
    except UNREADABLE:
        problems[file.name] = "damaged, left out"
        return ()


def _phases(events: EventLog) -> Iterator[UnitSpan]:
    began: list[int] = []
    for at, event in enumerate(events):
        if event.what is EventKind.BEGAN:
            began.append(at)
        elif event.what is EventKind.ENDED and began:
            first = began.pop()
            # The phase between phases contains the others, and reads by the harness are not the engine's.
            if event.phase not in {Phase.BETWEEN, Phase.OBSERVE}:
                yield _unit_span(events, None, first, at)


def _unit_spans(events: EventLog) -> Iterator[UnitSpan]:
    for span in compute_spans(events):
        yield _unit_span(events, span.unit, span.first, span.last)


def _unit_span(events: EventLog, unit: str | None, first: int, last: int) -> UnitSpan:
    event = events[first]
    return UnitSpan(
        unit=unit,
        phase=event.phase,
        step=event.step,
        microbatch=event.microbatch,
        first=_moment(events, first),
        last=_moment(events, last),
    )


def _collectives(events: EventLog, entries: dict[int, Entry]) -> Iterator[CollectiveSpan]:
    streams = {event.seq: event.stream for event in events if event.what is EventKind.PLACED}
    for in_flight in collectives_in_flight(events):
        entry = entries.get(in_flight.seq)
        if entry is None or entry.phase is Phase.OBSERVE:
            continue
        stream = streams.get(in_flight.seq)
        yield CollectiveSpan(
            entry=entry,
            lane=_group_lane(entry) if stream is None else _stream_lane(stream),
            issued=_moment(events, in_flight.issued),
            landed=None if in_flight.landed is None else _moment(events, in_flight.landed),
        )


def _race_mark(race: Race, events: EventLog, lanes: tuple[str, ...]) -> RaceMark:
    return RaceMark(
        race=race,
        lanes=(_touch_lane(race.first, lanes), _touch_lane(race.second, lanes)),
        first=_moment_at(events, race.first.at_ns),
        second=_moment_at(events, race.second.at_ns),
    )


def _touch_lane(touch: Touch, lanes: tuple[str, ...]) -> str:
    """A collective that blocks no stream has a stream of its own; it is drawn in the lane of collectives."""
    if touch.stream.endswith("own stream"):
        return next((lane for lane in lanes if lane != COMPUTE), COMPUTE)
    return _stream_lane(touch.stream)


def _stream_lane(stream: str) -> str:
    if stream == _DEFAULT_STREAM:
        return COMPUTE
    named = re.search(r"\((.+)\)$", stream)
    return named[1] if named else stream


def _group_lane(entry: Entry) -> str:
    return f"axis {entry.axis}" if entry.axis else f"{len(entry.group)} ranks"


def _moment(events: EventLog, at: int) -> TimePoint:
    return TimePoint(at_ns=events[at].at_ns, place=at)


def _moment_at(events: EventLog, at_ns: int) -> TimePoint:
    """Return the last position before a time for which the journal has no line."""
    before = [at for at, event in enumerate(events) if event.at_ns <= at_ns]
    return TimePoint(at_ns=at_ns, place=before[-1] if before else 0)
