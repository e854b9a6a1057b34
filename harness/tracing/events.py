"""The event log of one rank: calls, waits and the computation of units, in order of time. No torch here.

[Note: the event log] A ledger records the communication between ranks, and is the same in every run of a training. The
event log puts the calls and waits in one order with the units' computation, each with its time. It is part of the same
journal, in lines of its own, and its order is the order of the lines. Journals from before event logs have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from shardproof.harness.tracing.codec import decode
from shardproof.harness.tracing.ledger import Phase


class EventKind(Enum):
    """The kinds of events, in the order in which one unit passes through them."""

    BEGAN = "a phase of the loop began"
    ENDED = "a phase of the loop ended"
    ISSUED = "a collective was issued"
    WAITED = "a collective was first waited for"
    PLACED = "the stream on which a collective was issued"
    JOINED = "the stream on which units compute first waited for a collective"
    ENTERED = "a unit's forward was called"
    COMPUTES = "a unit's forward began to compute: the engine's own hooks are through"
    LEFT = "a unit's forward was computed"
    BACKWARD_ENTERED = "backward reached a unit"
    BACKWARD_STARTED = "a unit's gradients begin to be computed: the engine's own hooks are through"
    BACKWARD_ENDED = "the gradients of a unit's inputs are there"
    UNSHARDED = "a unit was seen whole"
    RESHARDED = "a unit was seen sharded"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """One event of a rank.

    ``at_ns`` is the time by a monotonic clock, comparable only between ranks of one machine. ``seq`` is the number of
    the call that the event concerns, else None. ``unit`` is the unit, else None; ``""`` is the root. ``stream`` is the
    name of the call's stream, which only a watch over streams records.
    """

    what: EventKind
    at_ns: int
    phase: Phase
    step: int
    microbatch: int
    unit: str | None = None
    seq: int | None = None
    stream: str | None = None


EventLog = tuple[TraceEvent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """One collective in flight on a rank; ``issued`` and ``landed`` are positions in the event log.

    It lands when the computation waits for it: the host, or under a watch over streams the stream on which units
    compute. ``landed`` is None without a wait.
    """

    seq: int
    issued: int
    landed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSpan:
    """A unit computes from one position of the event log to another, without an event of a unit in between."""

    unit: str
    first: int
    last: int
    is_backward: bool


# Any: JSON.
def events_of(line: Mapping[str, Any]) -> tuple[TraceEvent, ...]:
    """Read the events of one line of a rank's journal; raises the errors of reading JSON."""
    events = decode(EventLog, line["marks"]) if "marks" in line else ()
    if "at_ns" not in line:
        return events
    is_issue = "entry" in line
    place = line["entry"] if is_issue else line
    what, seq = (EventKind.ISSUED, place["seq"]) if is_issue else (EventKind.WAITED, line["wait"])
    where = (place["phase"], place["step"], place["microbatch"])
    return (*events, decode(TraceEvent, [what.name, line["at_ns"], *where, place.get("unit"), seq, None]))


def collectives_in_flight(events: EventLog) -> tuple[InFlight, ...]:
    """Return every collective with its issue and landing, in the order of issue."""
    # Where streams were watched, a wait of the host for another stream does not order computation.
    is_watched = any(event.what is EventKind.JOINED for event in events)
    landing = EventKind.JOINED if is_watched else EventKind.WAITED
    landed = {event.seq: at for at, event in reversed([*enumerate(events)]) if event.what is landing}
    return tuple(
        InFlight(seq=event.seq, issued=at, landed=landed.get(event.seq))
        for at, event in enumerate(events)
        if event.what is EventKind.ISSUED and event.seq is not None
    )


@dataclass(slots=True)
class _Frame:
    """A unit that was entered; ``since`` is the start of its present span, None while it does not compute."""

    unit: str
    is_backward: bool
    since: int | None = None


def compute_spans(events: Sequence[TraceEvent]) -> tuple[ComputeSpan, ...]:
    """Return the spans in which units computed, in order.

    A unit that calls another computes before and after it. In backward, hooks cannot see the computation of an outer
    unit after an inner one, so no span contains it. A forward that is recomputed in backward is part of backward.
    """
    return tuple(sorted(_ComputeSpans(events).found, key=lambda s: s.first))


class _ComputeSpans:
    """Reads an event log once; the frames are the units under way, the innermost last."""

    def __init__(self, events: Sequence[TraceEvent]) -> None:
        self.found: list[ComputeSpan] = []
        self._frames: list[_Frame] = []
        for at, event in enumerate(events):
            self._read(at, event)

    def _read(self, at: int, event: TraceEvent) -> None:
        unit = event.unit or ""
        match event.what:
            case EventKind.BEGAN | EventKind.ENDED:
                self._pause(at)
                self._frames.clear()
            case EventKind.ENTERED:
                self._pause(at)
                self._frames.append(_Frame(unit, event.phase is Phase.BACKWARD))
            case EventKind.BACKWARD_ENTERED:
                self._pause(at)
                self._frames = [_Frame(unit, is_backward=True)]
            case EventKind.COMPUTES | EventKind.BACKWARD_STARTED:
                if self._frames and self._frames[-1].unit == unit and self._frames[-1].since is None:
                    self._frames[-1].since = at
            case EventKind.LEFT:
                self._leave(at, unit)
            case EventKind.BACKWARD_ENDED:
                # A recomputed forward may have stopped early, and is part of the unit's own backward in any case.
                if any(frame.unit == unit for frame in self._frames):
                    self._pause(at)
                    self._frames.clear()
            case _:
                pass

    def _leave(self, at: int, unit: str) -> None:
        self._pause(at)
        while self._frames and self._frames.pop().unit != unit:
            pass
        if self._frames:
            self._frames[-1].since = at

    def _pause(self, at: int) -> None:
        if not self._frames or (since := self._frames[-1].since) is None:
            return
        frame = self._frames[-1]
        frame.since = None
        self.found.append(ComputeSpan(unit=frame.unit, first=since, last=at, is_backward=frame.is_backward))
