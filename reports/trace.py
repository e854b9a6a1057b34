"""A timeline in the trace-event format, which Perfetto and chrome://tracing open.

One process for each rank; its threads are the loop's phases and the lanes of the timeline. What a unit computes is a
complete event. A collective is an asynchronous event from its issue to its landing, with a short slice at each of the
two for arrows to start and end at: one from its issue to its landing, one through its issues on all ranks. A race is
two instants and an arrow between them. Times are microseconds since the first thing told; ranks of one machine share
a clock.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from harness.timeline import COMPUTE, Clash, Passage, RankTimeline, Spell, Timeline

__all__ = ["render", "trace_events"]

# Any, throughout: JSON.
_Event = dict[str, Any]

_PHASES = "phases"
_POINT_US = 1.0  # how long a slice is that stands for a moment; arrows need one to hold on to


def render(timeline: Timeline, *, title: str) -> str:
    """Give the whole file."""
    told = {"traceEvents": trace_events(timeline), "displayTimeUnit": "ns", "otherData": {"title": title}}
    return json.dumps(told, indent=None, separators=(",", ":"))


def trace_events(timeline: Timeline) -> list[_Event]:
    """Give the events: metadata first, then by time."""
    clock = _Clock(timeline)
    told: list[_Event] = []
    for rank in timeline.ranks:
        tids = {lane: tid for tid, lane in enumerate((_PHASES, *rank.lanes))}
        told += _names(rank, tids)
        told += (_slice(rank, tids[_PHASES], s, clock, "phase") for s in rank.phases)
        told += (_slice(rank, tids[COMPUTE], s, clock, "compute") for s in rank.spells)
        for passage in rank.passages:
            told += _passage(rank, tids, passage, clock)
        for number, clash in enumerate(rank.clashes):
            told += _clash(rank, tids, clash, number, clock)
    told += _across_ranks(timeline, clock)
    return sorted(told, key=lambda e: (e["ph"] != "M", e["ts"]))


class _Clock:
    """Microseconds since the first thing told; what never ended ends with its rank."""

    def __init__(self, timeline: Timeline) -> None:
        told = [m.at_ns for rank in timeline.ranks for m in _moments(rank)]
        self._first = min(told, default=0)
        self._last = {rank.rank: max((m.at_ns for m in _moments(rank)), default=0) for rank in timeline.ranks}

    def us(self, at_ns: int) -> float:
        """Give a moment's time."""
        return (at_ns - self._first) / 1000

    def landing_us(self, rank: RankTimeline, passage: Passage) -> float:
        """Give when a collective landed, or the end of its rank."""
        return self.us(self._last[rank.rank] if passage.landed is None else passage.landed.at_ns)


def _moments(rank: RankTimeline) -> Iterator[Any]:
    for spell in (*rank.phases, *rank.spells):
        yield from (spell.first, spell.last)
    for passage in rank.passages:
        yield from (m for m in (passage.issued, passage.landed) if m is not None)
    for clash in rank.clashes:
        yield from (clash.first, clash.second)


def _names(rank: RankTimeline, tids: dict[str, int]) -> Iterator[_Event]:
    yield _event("M", rank, 0, 0.0, "process_name", args={"name": f"rank {rank.rank}"})
    yield _event("M", rank, 0, 0.0, "process_sort_index", args={"sort_index": rank.rank})
    for lane, tid in tids.items():
        yield _event("M", rank, tid, 0.0, "thread_name", args={"name": lane})
        yield _event("M", rank, tid, 0.0, "thread_sort_index", args={"sort_index": tid})


def _slice(rank: RankTimeline, tid: int, spell: Spell, clock: _Clock, cat: str) -> _Event:
    first = clock.us(spell.first.at_ns)
    args = {"phase": spell.phase, "step": spell.step, "microbatch": spell.microbatch}
    dur = clock.us(spell.last.at_ns) - first
    return _event("X", rank, tid, first, spell.name, cat=cat, dur=dur, args=args)


def _passage(rank: RankTimeline, tids: dict[str, int], passage: Passage, clock: _Clock) -> Iterator[_Event]:
    entry, tid = passage.entry, tids[passage.lane]
    issued, landed = clock.us(passage.issued.at_ns), clock.landing_us(rank, passage)
    flight = f"{rank.rank}.{entry.seq}"
    args = {
        "unit": entry.unit,
        "phase": entry.phase,
        "step": entry.step,
        "group": list(entry.group),
        "group_seq": entry.group_seq,
        "dtype": entry.dtype,
        "num_bytes": entry.num_bytes,
        "site": entry.site,
        "waited": passage.landed is not None,
    }
    name = str(entry.op)
    yield _event("b", rank, tid, issued, name, cat="collective", id=flight, args=args)
    yield _event("e", rank, tid, landed, name, cat="collective", id=flight)
    yield _event("X", rank, tid, issued, f"issue {name}", cat="issue", dur=_POINT_US, args=args)
    if passage.landed is not None:
        waits = tids[COMPUTE]
        yield _event("X", rank, waits, landed, f"wait for {name}", cat="wait", dur=_POINT_US, args=args)
        yield _event("s", rank, tid, issued, "flight", cat="flight", id=flight)
        yield _event("f", rank, waits, landed, "flight", cat="flight", id=flight, bp="e")


def _clash(
    rank: RankTimeline, tids: dict[str, int], clash: Clash, number: int, clock: _Clock
) -> Iterator[_Event]:
    race, arrow = clash.race, f"race.{rank.rank}.{number}"
    touches = zip((race.first, race.second), clash.lanes, (clash.first, clash.second), strict=True)
    for arrow_end, (touch, lane, moment) in zip(("s", "f"), touches, strict=True):
        at = clock.us(moment.at_ns)
        args = {"touch": str(touch), "race": str(race)}
        name = f"race: {touch.operator} {'writes' if touch.is_write else 'reads'}"
        yield _event("i", rank, tids[lane], at, name, cat="race", s="t", args=args)
        yield _event("X", rank, tids[lane], at, name, cat="race", dur=_POINT_US, cname="terrible", args=args)
        ends = {"bp": "e"} if arrow_end == "f" else {}
        yield _event(arrow_end, rank, tids[lane], at, "race", cat="race", id=arrow, **ends)


def _across_ranks(timeline: Timeline, clock: _Clock) -> Iterator[_Event]:
    """Draw an arrow through the issues of each collective, from the first rank that issued it to the last."""
    issues: dict[Any, list[tuple[float, RankTimeline, Passage]]] = defaultdict(list)
    for rank in timeline.ranks:
        for passage in rank.passages:
            if passage.key is not None:
                issues[passage.key].append((clock.us(passage.issued.at_ns), rank, passage))
    for (group, seq), members in issues.items():
        told = sorted(members, key=lambda m: m[0])
        same = f"{'-'.join(map(str, group))}.{seq}"
        for ph, (at, rank, passage) in zip(_ends(told), told, strict=False):
            tid = rank.lanes.index(passage.lane) + 1
            ends = {"bp": "e"} if ph == "f" else {}
            yield _event(ph, rank, tid, at, "same collective", cat="ranks", id=same, **ends)


def _ends(members: Sequence[object]) -> list[str]:
    """Start, step and finish; what one rank alone issued has no arrow."""
    return ["s", *["t"] * (len(members) - 2), "f"] if len(members) > 1 else []


def _event(ph: str, rank: RankTimeline, tid: int, ts: float, name: str, **more: Any) -> _Event:
    return {"ph": ph, "ts": ts, "pid": rank.rank, "tid": tid, "name": name, **more}
