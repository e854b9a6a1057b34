"""Vector clocks: the events that happened before a moment of one timeline. Pure; no torch here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Epoch(NamedTuple):
    """A stretch of one timeline between two of its signals; waits can distinguish no shorter stretch."""

    timeline: int
    number: int


class Clock:
    """For each timeline, the last of its moments that happened before. Immutable: changes return a new clock."""

    __slots__ = ("_counts",)

    def __init__(self, counts: Mapping[int, int] = MappingProxyType({})) -> None:
        self._counts = dict(counts)

    def knows(self, moment: Epoch) -> bool:
        """Return whether ``moment`` happened before."""
        return self._counts.get(moment.timeline, 0) >= moment.number

    def joined(self, other: Clock) -> Clock:
        """Return the join of two clocks: all that happened before either."""
        if all(self._counts.get(timeline, 0) >= count for timeline, count in other._counts.items()):
            return self  # most waits add no order
        counts = dict(self._counts)
        for timeline, count in other._counts.items():
            counts[timeline] = max(counts.get(timeline, 0), count)
        return Clock(counts)

    def at(self, moment: Epoch) -> Clock:
        """Return this clock at ``moment`` of its own timeline."""
        return Clock({**self._counts, moment.timeline: moment.number})


class HappensBefore:
    """The happens-before order on one rank: a clock for each timeline, advanced by signals and waits alone.

    A timeline is a stream, or an asynchronous collective, which is a stream of its own from its issue until it is
    waited for. The host is not a timeline: it issues work to all of them, and its waits order all later work on every
    timeline.
    """

    def __init__(self) -> None:
        self._clocks: list[Clock] = []
        self._moments: list[Epoch] = []
        self._host = Clock()

    def begin(self, after: Clock | None = None) -> int:
        """Start a timeline, ordered after the host's waits and, if given, ``after``; return its number."""
        timeline = len(self._clocks)
        moment = Epoch(timeline, 1)
        self._moments.append(moment)
        self._clocks.append((self._host if after is None else self._host.joined(after)).at(moment))
        return timeline

    def moment(self, timeline: int) -> Epoch:
        return self._moments[timeline]

    def clock(self, timeline: int) -> Clock:
        """Return what happens before the next work on a timeline."""
        return self._clocks[timeline]

    @property
    def host(self) -> Clock:
        """What the host has waited for."""
        return self._host

    def signal(self, timeline: int) -> Clock:
        """Record an event; return what has happened when it fires: all work issued on the timeline so far."""
        fired = self._clocks[timeline]
        later = Epoch(timeline, self._moments[timeline].number + 1)
        self._moments[timeline] = later
        self._clocks[timeline] = fired.at(later)
        return fired

    def wait(self, timeline: int, fired: Clock) -> None:
        """Order all later work on a timeline after ``fired``."""
        self._clocks[timeline] = self._clocks[timeline].joined(fired)

    def host_waits(self, fired: Clock) -> None:
        """Order all later work, on any timeline, after ``fired``."""
        self._host = self._host.joined(fired)
        self._clocks = [clock.joined(fired) for clock in self._clocks]
