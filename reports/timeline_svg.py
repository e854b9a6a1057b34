"""A timeline as SVG: lanes by rank, computation, collectives in flight, races in red; and the choice of records.

[Note: order, not time] Left to right is the order of events, so that a picture of a small model can be read and is the
same on every machine. Ranks are aligned only by collectives: the same collective is issued in the same column on all of
them, as far as they agree on the order. Computation has a fixed width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import NamedTuple

from shardproof.harness.records.rank_timeline import (
    COMPUTE,
    CollectiveSpan,
    RaceMark,
    RankTimeline,
    Timeline,
    UnitSpan,
    read_timeline,
)
from shardproof.harness.records.record import Record, RecordKey, Verdict
from shardproof.harness.records.run import Run
from shardproof.harness.tracing.ledger import Op
from shardproof.harness.tracing.races.race_report import Touch
from shardproof.reports.matrix import by_severity
from shardproof.reports.text import one_line, size

_ROOM = 8  # columns for an uninterrupted stretch of computation


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The column of each position of each rank, and the number of columns."""

    columns: Mapping[int, Mapping[int, int]]
    width: int

    def column(self, rank: int, place: int) -> int:
        """Return the column; for a position that nothing drawn has, that of the previous one."""
        known = self.columns[rank]
        if place in known:
            return known[place]
        return max((column for at, column in known.items() if at < place), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRow:
    """Collectives of one lane of which no two are in flight at once, so that one line holds them."""

    lane: str
    collectives: tuple[CollectiveSpan, ...]


def lay_out(timeline: Timeline) -> Columns:
    """Return a column for every position: after its predecessor, and where all its collective's ranks have arrived."""
    walks = [_Walk(rank) for rank in timeline.ranks]
    while any(not walk.is_over for walk in walks):
        for walk in walks:
            walk.go_to_next_issue()
        _meet([walk for walk in walks if not walk.is_over])
    columns = {walk.rank: walk.columns for walk in walks}
    return Columns(columns=columns, width=max((walk.column for walk in walks), default=0) + 1)


def rows_of(rank: RankTimeline, lane: str) -> tuple[LaneRow, ...]:
    """Spread the collectives of one lane over as few lines as possible."""
    lines: list[list[CollectiveSpan]] = []
    for collective in (p for p in rank.collectives if p.lane == lane):
        free = (line for line in lines if _is_over(line[-1], collective))
        line = next(free, None)
        if line is None:
            lines.append(line := [])
        line.append(collective)
    return tuple(LaneRow(lane=lane, collectives=tuple(line)) for line in lines)


def _is_over(earlier: CollectiveSpan, later: CollectiveSpan) -> bool:
    return earlier.landed is not None and earlier.landed.place < later.issued.place


class _Walk:
    """One rank's positions from left to right."""

    def __init__(self, rank: RankTimeline) -> None:
        self.rank = rank.rank
        self.columns: dict[int, int] = {}
        self.column = 0
        self._issues = {p.issued.place: p for p in rank.collectives}
        self._begins = {s.first.place for s in rank.unit_spans}
        landings = (p.landed.place for p in rank.collectives if p.landed is not None)
        ends = (place for s in (*rank.phases, *rank.unit_spans) for place in (s.first.place, s.last.place))
        self._places = sorted({*self._issues, *landings, *ends})
        self._next = 0

    @property
    def is_over(self) -> bool:
        """Whether every position has a column."""
        return self._next == len(self._places)

    @property
    def issue(self) -> CollectiveSpan:
        """The collective before which the walk has stopped."""
        return self._issues[self._places[self._next]]

    def go_to_next_issue(self) -> None:
        """Assign columns up to the next collective, which ranks reach together."""
        while not self.is_over and self._places[self._next] not in self._issues:
            self.step(self.column)

    def step(self, column: int) -> None:
        """Assign the next position a column."""
        place = self._places[self._next]
        self.columns[place] = column
        self.column = column + (_ROOM if place in self._begins else 1)
        self._next += 1


def _meet(walks: Sequence[_Walk]) -> None:
    """Let ranks pass that are all at the same collective; if there are none, the order differs and one rank goes on."""
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


_STYLE = Path(__file__).parent / "templates" / "timeline.css"
# The colours of the page, for a picture without one.
_COLOURS = """svg { --card: #ffffff; --ink: #1d1f23; --soft: #5c626d; --line: #e2e0da; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  svg { --card: #1b1d21; --ink: #e7e6e2; --soft: #a0a5b0; --line: #30333a; --bad: #ff8a7e; }
}
.back { fill: var(--card); stroke: var(--line); }
"""

_MOST_COLUMNS = 900  # above this a picture has no room for names, and a page none for the picture
_MOST_RANKS = 4
_LEFT, _COLUMN, _MARGIN = 138, 7, 12
_HEAD, _COMPUTE, _ROW, _GAP = 30, 26, 20, 16
_TONES = {
    **dict.fromkeys((Op.ALL_GATHER, Op.BROADCAST), "gather"),
    **dict.fromkeys((Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.REDUCE), "reduction"),
}
_LETTER = 6.2  # the width of a character, as far as a picture can determine it
_MOST_CLASHES = 12  # of a rank, in one picture
_MOST_TOLD = 6  # races in words below a picture


def draw(timeline: Timeline) -> str:
    """Draw the most informative step; empty if there is nothing to draw, or too much."""
    step = timeline.step_to_report
    if step is None:
        return ""
    shown = _shown(timeline.of_step(step))
    layout = lay_out(shown)
    if layout.width > _MOST_COLUMNS or not any(rank.unit_spans or rank.collectives for rank in shown.ranks):
        return ""
    picture = _Picture(layout, step)
    body = list(picture.body(shown, len(timeline.ranks)))
    return "\n".join(
        [
            f'<svg class="timeline" xmlns="http://www.w3.org/2000/svg" width="{picture.width}"'
            f' height="{picture.height}" viewBox="0 0 {picture.width} {picture.height}" role="img">',
            f"<title>Step {step}, rank by rank: what computes, and which collectives are under way</title>",
            *body,
            "</svg>",
        ]
    )


def draw_alone(timeline: Timeline) -> str:
    """Draw it as a standalone file, with its colours."""
    head, _, rest = draw(timeline).partition("</title>")
    style = f"<style>{_COLOURS}{_STYLE.read_text(encoding='utf-8')}</style>"
    return f'{head}</title>\n{style}\n<rect class="back" width="100%" height="100%" rx="8"/>{rest}\n'


def _shown(timeline: Timeline) -> Timeline:
    """Keep as many ranks as a picture has room for, those with races first."""
    ordered = sorted(timeline.ranks, key=lambda r: (not r.races, r.rank))
    kept = {rank.rank for rank in ordered[:_MOST_RANKS]}
    return timeline.of_ranks(kept.__contains__)


class _Picture:
    """Draws from top to bottom; ``height`` grows meanwhile."""

    def __init__(self, layout: Columns, step: int) -> None:
        self.width = _LEFT + layout.width * _COLUMN + 2 * _MARGIN
        self.height = _MARGIN
        self._layout = layout
        self._step = step
        self._middles: dict[tuple[int, str], float] = {}  # of lanes
        self._heights: dict[tuple[int, int], float] = {}  # of collectives, by rank and number

    def body(self, timeline: Timeline, num_ranks: int) -> Iterator[str]:
        """Draw every rank, then the legend and each race in words."""
        for rank in timeline.ranks:
            yield from self._rank(rank)
            for mark in rank.races[:_MOST_CLASHES]:
                yield from self._race_mark(rank, mark)
            self.height += _GAP
        text = f"Step {self._step}. Left to right is order, not time. Dot: issued; tick: what computes waits."
        if len(timeline.ranks) < num_ranks:
            text += f" {len(timeline.ranks)} of {num_ranks} ranks."
        yield self._line("soft", text)
        yield from self._races(timeline)

    def _races(self, timeline: Timeline) -> Iterator[str]:
        texts = dict.fromkeys(
            f"{c.race.kind}: {c.race.first.operator} on {c.lanes[0]}, then {c.race.second.operator} on {c.lanes[1]}"
            for r in timeline.ranks
            for c in r.races
        )
        for text in list(texts)[:_MOST_TOLD]:
            yield self._line("alarm", text)
        if len(texts) > _MOST_TOLD:
            yield self._line("alarm", f"and {len(texts) - _MOST_TOLD} more races")

    def _line(self, kind: str, words: str) -> str:
        self.height += 16
        self.width = max(self.width, int(2 * _MARGIN + len(words) * _LETTER))
        return _text(kind, _MARGIN, self.height - 6, words)

    def _rank(self, rank: RankTimeline) -> Iterator[str]:
        yield _text("rank", _MARGIN, self.height + 14, f"rank {rank.rank}")
        yield from (self._phase(rank, phase, self.height + 20) for phase in rank.phases)
        self.height += _HEAD
        yield _text("soft", _MARGIN, self.height + 17, COMPUTE)
        self._middles[rank.rank, COMPUTE] = self.height + _COMPUTE / 2
        for unit_span in rank.unit_spans:
            yield from self._unit_span(rank, unit_span)
        self.height += _COMPUTE + 4
        for row in rows_of(rank, COMPUTE):
            yield from self._row(rank, row)
        for lane in rank.lanes[1:]:
            yield from self._lane(rank, lane)
        yield f'<path class="rule" d="M{_MARGIN} {self.height + 8} H{self.width - _MARGIN}"/>'

    def _lane(self, rank: RankTimeline, lane: str) -> Iterator[str]:
        rows = rows_of(rank, lane)
        if not rows and not any(lane in mark.lanes for mark in rank.races):
            return
        yield _text("soft", _MARGIN, self.height + 13, one_line(lane, 22))
        self._middles[rank.rank, lane] = self.height + _ROW / 2
        for row in rows:
            yield from self._row(rank, row)
        self.height += 0 if rows else _ROW

    def _phase(self, rank: RankTimeline, phase: UnitSpan, top: float) -> str:
        first, last = self._x(rank, phase.first.place), self._x(rank, phase.last.place)
        name = phase.name if phase.microbatch <= 0 else f"{phase.name} {phase.microbatch}"
        return f'<path class="phase" d="M{first} {top + 6} V{top} H{last} V{top + 6}"/>' + (
            _text("soft mid", (first + last) / 2, top - 4, name) if _fits(name, last - first) else ""
        )

    def _unit_span(self, rank: RankTimeline, unit_span: UnitSpan) -> Iterator[str]:
        first, last = self._x(rank, unit_span.first.place), self._x(rank, unit_span.last.place)
        tone = "whole" if unit_span.unit else "around"
        name = _first_that_fits((unit_span.name, unit_span.name.rpartition(".")[2]), last - first)
        title = _words(f"{unit_span.name} computes in {unit_span.phase}")
        yield (
            f'<rect class="unit {tone}" x="{first}" y="{self.height}" width="{max(last - first, 2)}"'
            f' height="{_COMPUTE}" rx="3"><title>{title}</title></rect>'
        )
        if name:
            yield _text("mid", (first + last) / 2, self.height + 17, name)

    def _row(self, rank: RankTimeline, row: LaneRow) -> Iterator[str]:
        for collective in row.collectives:
            yield from self._collective(rank, collective)
        self.height += _ROW

    def _collective(self, rank: RankTimeline, collective: CollectiveSpan) -> Iterator[str]:
        entry, top = collective.entry, self.height
        self._heights[rank.rank, entry.seq] = top + _ROW / 2
        first = self._x(rank, collective.issued.place)
        is_open = collective.landed is None
        last = (
            self.width - 2 * _MARGIN if collective.landed is None else self._x(rank, collective.landed.place)
        )
        waited = "never waited for" if is_open else "waited for where it ends"
        words = f"{entry.describe()}, {entry.phase}, in the turn of {entry.unit or 'root'}; {waited}"
        name, weight = str(entry.op).replace("_", "-"), size(entry.num_bytes)
        label = _first_that_fits((f"{name} {weight}", weight), last - first)
        yield f'<g class="{_TONES.get(entry.op, "other")}"><title>{_words(words)}</title>'
        yield (
            f'<rect class="call{" open" if is_open else ""}" x="{first}" y="{top + 2}"'
            f' width="{max(last - first, 2)}" height="{_ROW - 5}" rx="2"/>'
        )
        yield f'<circle class="dot" cx="{first}" cy="{top + _ROW / 2 - 0.5}" r="3"/>'
        if not is_open:
            yield f'<path class="tick" d="M{last} {top} V{top + _ROW - 1}"/>'
        yield "</g>"
        if label:
            yield _text("mid", (first + last) / 2, top + 13, label)

    def _race_mark(self, rank: RankTimeline, mark: RaceMark) -> Iterator[str]:
        touches = (mark.race.first, mark.race.second)
        points = [
            (self._x(rank, moment.place) + _COLUMN / 2, self._touched(rank, lane, touch))
            for lane, moment, touch in zip(mark.lanes, (mark.first, mark.second), touches, strict=True)
        ]
        (x, y), (to_x, to_y) = points
        yield f"<g><title>{_words(str(mark.race))}</title>"
        yield f'<path class="clash" d="M{x} {y} L{to_x} {to_y}"/>'
        for at_x, at_y in points:
            yield f'<circle class="touch" cx="{at_x}" cy="{at_y}" r="5"/>'
        yield "</g>"

    def _touched(self, rank: RankTimeline, lane: str, touch: Touch) -> float:
        """Return the height of an access: that of its collective, else that of its lane."""
        issued = [
            p for p in rank.collectives if p.entry.op == touch.operator and p.issued.at_ns <= touch.at_ns
        ]
        if issued:
            return self._heights[rank.rank, issued[-1].entry.seq]
        return self._middles.get((rank.rank, lane), self.height)

    def _x(self, rank: RankTimeline, place: int) -> int:
        return _LEFT + self._layout.column(rank.rank, place) * _COLUMN


def _fits(words: str, room: float) -> bool:
    return len(words) * _LETTER <= room


def _first_that_fits(words: Sequence[str], room: float) -> str:
    return next((text for text in words if _fits(text, room)), "")


def _text(kind: str, x: float, y: float, words: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{_words(words)}</text>'


def _words(text: str) -> str:
    return escape(one_line(text, 400))


_MOST_PICTURES = 24  # about 20 KiB each
_MOST_OF_FAILURES = 16  # so that some room is left for passed records


class Pictures(NamedTuple):
    """Pictures by their records, and the files that were damaged when they were read."""

    drawn: dict[RecordKey, str]
    problems: tuple[str, ...]


def pictures(run: Run, run_dir: Path) -> Pictures:
    """Draw the failures, the worst first, and one passed case of each suite.

    Records without observations, or too long for a picture, are left out; `shardproof timeline` exports those too.
    """
    drawn: dict[RecordKey, str] = {}
    problems: dict[str, None] = {}
    for record in _worth_drawing(run):
        if len(drawn) == _MOST_PICTURES:
            break
        if not record.observation:
            continue
        timeline = read_timeline(run_dir / record.observation)
        problems |= dict.fromkeys(f"{record.observation}/{problem}" for problem in timeline.problems)
        if picture := draw(timeline):
            drawn[record.key] = picture
    return Pictures(drawn, tuple(problems))


def _worth_drawing(run: Run) -> Iterator[Record]:
    failures = [r for r in by_severity(run.records) if r.verdict is not Verdict.PASSED]
    text = [r for r in failures if r.verdict not in {Verdict.UNSUPPORTED, Verdict.NOT_RUN}]
    yield from text[:_MOST_OF_FAILURES]
    suites: set[str] = set()
    for record in run.records:
        if record.verdict is Verdict.PASSED and record.suite not in suites:
            suites.add(record.suite)
            yield record
