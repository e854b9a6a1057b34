"""Where the things of a timeline stand in a picture: one column for each event, the same collective in the same one.

[Note: order, not time] Left to right is the order of what happened, so that a picture of a small model can be read and
is the same on every machine. Of two ranks nothing but collectives is compared: the same collective is issued in the
same column on all of them, as far as they agree on the order. What computes is given room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.records.timeline import CollectiveSpan, RankTimeline, Timeline

__all__ = ["Layout", "Row", "lay_out", "rows_of"]

_ROOM = 8  # columns for a stretch of compute that nothing interrupts


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The column of each place of each rank, and how many there are in all."""

    columns: Mapping[int, Mapping[int, int]]
    width: int

    def column(self, rank: int, place: int) -> int:
        """Give the column; of a place that nothing drawn has, that of the one before."""
        known = self.columns[rank]
        if place in known:
            return known[place]
        return max((column for at, column in known.items() if at < place), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Collectives of one lane of which no two are under way at once, so that one line holds them."""

    lane: str
    passages: tuple[CollectiveSpan, ...]


def lay_out(timeline: Timeline) -> Layout:
    """Give every place a column: after what is before it, and where all ranks of its collective have come."""
    walks = [_Walk(rank) for rank in timeline.ranks]
    while any(not walk.is_over for walk in walks):
        for walk in walks:
            walk.go_to_next_issue()
        _meet([walk for walk in walks if not walk.is_over])
    columns = {walk.rank: walk.columns for walk in walks}
    return Layout(columns=columns, width=max((walk.column for walk in walks), default=0) + 1)


def rows_of(rank: RankTimeline, lane: str) -> tuple[Row, ...]:
    """Spread the collectives of one lane over as few lines as hold them."""
    lines: list[list[CollectiveSpan]] = []
    for passage in (p for p in rank.passages if p.lane == lane):
        free = (line for line in lines if _is_over(line[-1], passage))
        line = next(free, None)
        if line is None:
            lines.append(line := [])
        line.append(passage)
    return tuple(Row(lane=lane, passages=tuple(line)) for line in lines)


def _is_over(earlier: CollectiveSpan, later: CollectiveSpan) -> bool:
    return earlier.landed is not None and earlier.landed.place < later.issued.place


class _Walk:
    """One rank's places from left to right."""

    def __init__(self, rank: RankTimeline) -> None:
        self.rank = rank.rank
        self.columns: dict[int, int] = {}
        self.column = 0
        self._issues = {p.issued.place: p for p in rank.passages}
        self._begins = {s.first.place for s in rank.spells}
        landings = (p.landed.place for p in rank.passages if p.landed is not None)
        ends = (place for s in (*rank.phases, *rank.spells) for place in (s.first.place, s.last.place))
        self._places = sorted({*self._issues, *landings, *ends})
        self._next = 0

    @property
    def is_over(self) -> bool:
        """Whether every place has a column."""
        return self._next == len(self._places)

    @property
    def issue(self) -> CollectiveSpan:
        """The collective before which the walk has stopped."""
        return self._issues[self._places[self._next]]

    def go_to_next_issue(self) -> None:
        """Give columns up to the next collective, which ranks come to together."""
        while not self.is_over and self._places[self._next] not in self._issues:
            self.step(self.column)

    def step(self, column: int) -> None:
        """Give the next place a column."""
        place = self._places[self._next]
        self.columns[place] = column
        self.column = column + (_ROOM if place in self._begins else 1)
        self._next += 1


def _meet(walks: Sequence[_Walk]) -> None:
    """Let ranks pass that are all at the same collective; where none are, the order differs and one goes alone."""
    waiting: dict[object, list[_Walk]] = {}
    for walk in walks:
        waiting.setdefault(walk.issue.key or walk, []).append(walk)
    drawn = {walk.rank for walk in walks}
    met = [
        together
        for key, together in waiting.items()
        if not isinstance(key, tuple) or {w.rank for w in together} >= drawn & set(key[0])
    ]
    for together in met or list(waiting.values())[:1]:
        column = max(walk.column for walk in together)
        for walk in together:
            walk.step(column)
