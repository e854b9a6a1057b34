"""Vector clocks: what has surely happened by a moment of one timeline. Pure; no torch here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Epoch(NamedTuple):
    """A stretch of one timeline between two signals that it gave: what else could wait for, no finer."""

    timeline: int
    number: int


class Clock:
    """For each timeline, the last of its moments that has surely passed. A value: every change is a new clock."""

    __slots__ = ("_counts",)

    def __init__(self, counts: Mapping[int, int] = MappingProxyType({})) -> None:
        self._counts = dict(counts)

    def knows(self, moment: Epoch) -> bool:
        """Whether ``moment`` has surely passed."""
        return self._counts.get(moment.timeline, 0) >= moment.number

    def joined(self, other: Clock) -> Clock:
        """Return the clock that knows what either knows."""
        if all(self._counts.get(timeline, 0) >= count for timeline, count in other._counts.items()):
            return self  # most waits order nothing new
        counts = dict(self._counts)
        for timeline, count in other._counts.items():
            counts[timeline] = max(counts.get(timeline, 0), count)
        return Clock(counts)

    def at(self, moment: Epoch) -> Clock:
        """Return the clock of the same knowledge that has come to ``moment`` of its own timeline."""
        return Clock({**self._counts, moment.timeline: moment.number})


class HappensBefore:
    """What is ordered before what on one rank: a clock for each timeline, moved by signals and waits alone.

    A timeline is a stream, or an asynchronous collective, which is a stream of its own from its issue until
    it is waited for. The host is none: it issues to all of them, and what it waits for orders whatever
    is issued later, wherever.
    """

    def __init__(self) -> None:
        self._clocks: list[Clock] = []
        self._moments: list[Epoch] = []
        self._host = Clock()

    def begin(self, after: Clock | None = None) -> int:
        """Start a timeline, ordered after nothing but what the host waited for, or ``after`` besides; name it."""
        timeline = len(self._clocks)
        moment = Epoch(timeline, 1)
        self._moments.append(moment)
        self._clocks.append((self._host if after is None else self._host.joined(after)).at(moment))
        return timeline

    def moment(self, timeline: int) -> Epoch:
        return self._moments[timeline]

    def clock(self, timeline: int) -> Clock:
        """Return what has surely happened before whatever is issued next on a timeline."""
        return self._clocks[timeline]

    def signal(self, timeline: int) -> Clock:
        """Record an event: give what has happened when it fires, all that is issued on the timeline so far."""
        fired = self._clocks[timeline]
        later = Epoch(timeline, self._moments[timeline].number + 1)
        self._moments[timeline] = later
        self._clocks[timeline] = fired.at(later)
        return fired

    def wait(self, timeline: int, fired: Clock) -> None:
        """Order whatever is issued on a timeline from now on after ``fired``."""
        self._clocks[timeline] = self._clocks[timeline].joined(fired)

    def host_waits(self, fired: Clock) -> None:
        """Order whatever is issued from now on, on any timeline, after ``fired``."""
        self._host = self._host.joined(fired)
        self._clocks = [clock.joined(fired) for clock in self._clocks]
