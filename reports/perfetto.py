"""A timeline in the trace-event format, which Perfetto and chrome://tracing open.

One process for each rank; its threads are the loop's phases and the lanes of the timeline. A unit's computation is a
complete event. A collective is an asynchronous event from its issue to its landing. Arrows start and end at short
slices: one arrow from a collective's issue to its landing, one through its issues on all ranks. A race is two instants
and an arrow between them. Times are microseconds since the first event; ranks of one machine share a clock.

[Note: identifiers] Perfetto accepts less than the format's description allows. An arrow's identifier must be a number,
else it is dropped as an import error. Threads are identified by their tid alone, in whatever process they are, and tid
0 is not a thread of its own. An asynchronous event belongs to a process only if its identifier is marked as local.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from shardproof.harness.records.rank_timeline import (
    COMPUTE,
    CollectiveSpan,
    RaceMark,
    RankTimeline,
    Timeline,
    TimePoint,
    UnitSpan,
)

# Any, throughout: JSON.
_Event = dict[str, Any]

_PHASES = "phases"
_POINT_US = 1.0  # the length of a slice that represents a moment; arrows need one as an end
_POINTS = frozenset({"issue", "wait", "race"})
_MAX_THREADS = (
    100  # factor of a rank, so that the tids of its threads contain its number; see [Note: identifiers]
)


def render(timeline: Timeline, *, title: str) -> str:
    """Return the whole file."""
    document = {"traceEvents": trace_events(timeline), "displayTimeUnit": "ns", "otherData": {"title": title}}
    return json.dumps(document, indent=None, separators=(",", ":"))


def trace_events(timeline: Timeline) -> list[_Event]:
    """Return the events: metadata first, then by time."""
    clock = _Clock(timeline)
    processes = [_Process(rank, clock) for rank in timeline.ranks]
    arrows = [*_across_ranks(processes)]
    events: list[_Event] = []
    for process in processes:
        rank = process.rank
        events += process.names()
        events += (process.slice(_PHASES, s, "phase") for s in rank.phases)
        events += (process.slice(COMPUTE, s, "compute") for s in rank.unit_spans)
        for collective in rank.collectives:
            events += _collective(process, collective)
            arrows += _flight(process, collective)
        for mark in rank.races:
            events += _race_mark(process, mark)
            arrows.append(_Arrow("race", "race", _touched(process, mark)))
    _shorten_points(events)
    for number, arrow in enumerate(arrows, start=1):
        events += arrow.events(number)
    return sorted(events, key=lambda e: (e["ph"] != "M", e["ts"]))


def _shorten_points(events: Sequence[_Event]) -> None:
    """End each instant event before the next event of its thread begins or ends.

    Perfetto drops a slice that begins inside another and ends after it.
    """
    threads: dict[int, list[_Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["tid"]].append(event)
    for slices in threads.values():
        lasting = [e for e in slices if e["cat"] not in _POINTS]
        times = sorted([*(e["ts"] for e in slices), *(e["ts"] + e["dur"] for e in lasting)])
        for event in slices:
            after = bisect_right(times, event["ts"])
            if event["cat"] in _POINTS and after < len(times):
                event["dur"] = min(event["dur"], round(times[after] - event["ts"], 3))


class _Clock:
    """Microseconds since the first event; a span without an end ends with its rank."""

    def __init__(self, timeline: Timeline) -> None:
        times = [m.at_ns for rank in timeline.ranks for m in _moments(rank)]
        self._first = min(times, default=0)
        self._last = {rank.rank: max((m.at_ns for m in _moments(rank)), default=0) for rank in timeline.ranks}

    def us(self, moment: TimePoint) -> float:
        """Return a moment's time."""
        return self._us(moment.at_ns)

    def landing_us(self, rank: int, collective: CollectiveSpan) -> float:
        """Return when a collective landed, or the end of its rank."""
        return self._us(self._last[rank] if collective.landed is None else collective.landed.at_ns)

    def _us(self, at_ns: int) -> float:
        return (at_ns - self._first) / 1000


def _moments(rank: RankTimeline) -> Iterator[TimePoint]:
    for unit_span in (*rank.phases, *rank.unit_spans):
        yield from (unit_span.first, unit_span.last)
    for collective in rank.collectives:
        yield from (m for m in (collective.issued, collective.landed) if m is not None)
    for mark in rank.races:
        yield from (mark.first, mark.second)


class _Process:
    """A rank as a process of the trace, its lanes as threads; see [Note: identifiers]."""

    def __init__(self, rank: RankTimeline, clock: _Clock) -> None:
        self.rank = rank
        self.clock = clock
        self._pid = _MAX_THREADS * (rank.rank + 1)
        self._tids = {lane: tid for tid, lane in enumerate((_PHASES, *rank.lanes), start=self._pid)}

    def event(self, ph: str, lane: str, ts: float, name: str, **more: Any) -> _Event:
        return {"ph": ph, "ts": ts, "pid": self._pid, "tid": self._tids[lane], "name": name, **more}

    def names(self) -> Iterator[_Event]:
        """Yield the names and the order of rank and lanes for a viewer."""
        yield self.event("M", _PHASES, 0.0, "process_name", args={"name": f"rank {self.rank.rank}"})
        yield self.event("M", _PHASES, 0.0, "process_sort_index", args={"sort_index": self.rank.rank})
        for place, lane in enumerate(self._tids):
            yield self.event("M", lane, 0.0, "thread_name", args={"name": lane})
            yield self.event("M", lane, 0.0, "thread_sort_index", args={"sort_index": place})

    def slice(self, lane: str, unit_span: UnitSpan, cat: str) -> _Event:
        first, last = self.clock.us(unit_span.first), self.clock.us(unit_span.last)
        args = {"phase": unit_span.phase, "step": unit_span.step, "microbatch": unit_span.microbatch}
        return self.event("X", lane, first, unit_span.name, cat=cat, dur=last - first, args=args)

    def point(self, lane: str, ts: float, name: str, cat: str, **more: Any) -> _Event:
        """Return a slice that represents a moment."""
        return self.event("X", lane, ts, name, cat=cat, dur=_POINT_US, **more)


class _Place(NamedTuple):
    """An end of an arrow: a lane of a rank, at a time."""

    process: _Process
    lane: str
    ts: float


class _Arrow(NamedTuple):
    """An arrow through two places or more, in order of time."""

    name: str
    cat: str
    places: Sequence[_Place]

    def events(self, number: int) -> Iterator[_Event]:
        """Yield start, step and finish, with the same number."""
        inner = len(self.places) - 2
        for ph, (process, lane, ts) in zip(("s", *"t" * inner, "f"), self.places, strict=True):
            ends = {"bp": "e"} if ph == "f" else {}
            yield process.event(ph, lane, ts, self.name, cat=self.cat, id=number, **ends)


def _collective(process: _Process, collective: CollectiveSpan) -> Iterator[_Event]:
    entry, lane = collective.entry, collective.lane
    issued, landed = (
        process.clock.us(collective.issued),
        process.clock.landing_us(process.rank.rank, collective),
    )
    args = {
        "unit": entry.unit,
        "phase": entry.phase,
        "step": entry.step,
        "group": list(entry.group),
        "group_seq": entry.group_seq,
        "dtype": entry.dtype,
        "num_bytes": entry.num_bytes,
        "site": entry.site,
        "waited": collective.landed is not None,
    }
    name, local = str(entry.op), {"local": hex(entry.seq)}
    yield process.event("b", lane, issued, name, cat="collective", id2=local, args=args)
    yield process.event("e", lane, landed, name, cat="collective", id2=local)
    yield process.point(lane, issued, f"issue {name}", "issue", args=args)
    if collective.landed is not None:
        yield process.point(COMPUTE, landed, f"wait for {name}", "wait", args=args)


def _flight(process: _Process, collective: CollectiveSpan) -> Iterator[_Arrow]:
    """Draw an arrow from the issue of a collective to the wait for it, if there is one."""
    if collective.landed is not None:
        issued, landed = process.clock.us(collective.issued), process.clock.us(collective.landed)
        places = (_Place(process, collective.lane, issued), _Place(process, COMPUTE, landed))
        yield _Arrow("flight", "flight", places)


def _race_mark(process: _Process, mark: RaceMark) -> Iterator[_Event]:
    race = mark.race
    for touch, (_, lane, at) in zip((race.first, race.second), _touched(process, mark), strict=True):
        args = {"touch": str(touch), "race": str(race)}
        name = f"race: {touch.operator} {'writes' if touch.is_write else 'reads'}"
        yield process.event("i", lane, at, name, cat="race", s="t", args=args)
        yield process.point(lane, at, name, "race", cname="terrible", args=args)


def _touched(process: _Process, mark: RaceMark) -> list[_Place]:
    moments = zip(mark.lanes, (mark.first, mark.second), strict=True)
    return [_Place(process, lane, process.clock.us(moment)) for lane, moment in moments]


def _across_ranks(processes: Sequence[_Process]) -> Iterator[_Arrow]:
    """Draw an arrow through the issues of each collective, from the first rank that issued it to the last."""
    issues: dict[Any, list[_Place]] = defaultdict(list)
    for process in processes:
        for collective in process.rank.collectives:
            if collective.key is not None:
                place = _Place(process, collective.lane, process.clock.us(collective.issued))
                issues[collective.key].append(place)
    for places in issues.values():
        if len(places) > 1:  # a collective that only one rank issued has no arrow
            yield _Arrow("same collective", "ranks", sorted(places, key=lambda place: place.ts))
