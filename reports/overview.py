"""A run as a small table: engines down, worlds across, in each cell what holds of the declared promises."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.records.run import Run
from shardproof.reports.matrix import columns
from shardproof.reports.summary import Tally, tally
from shardproof.reports.text import one_line
from shardproof.reports.verdict_style import MARKS, VerdictStyle

_LONGEST_NAME = 24
_GAP = "  "
_GOOD = (Verdict.PASSED, Verdict.UNSUPPORTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellCounts:
    """The counts of one engine in one world, or in several worlds that are folded."""

    column: int  # its number in the matrix; of folded ones the first
    counted: Tally

    @property
    def text(self) -> str:
        """How many promises hold, then how many have other verdicts, with their letters; "-" if none is declared."""
        others = [
            f"{n}{MARKS[verdict].letter}"
            for verdict, n in self.counted.counts.items()
            if verdict not in _GOOD
        ]
        return " ".join([str(self.counted.passed), *others]) if self.counted.declared else "-"

    @property
    def style(self) -> VerdictStyle:
        """The style of the worst verdict."""
        passed = Verdict.PASSED if self.counted.declared else Verdict.UNSUPPORTED
        return MARKS[next((verdict for verdict in self.counted.counts if verdict not in _GOOD), passed)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The cells of each engine, one for each of the worlds; None where it was not judged."""

    worlds: tuple[str, ...]
    engines: tuple[tuple[str, tuple[CellCounts | None, ...]], ...]


def overview(run: Run, fold: Callable[[str], str] = str) -> Overview:
    """Count the records of a run; worlds for which ``fold`` returns the same text share a column."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in run.records:
        found.setdefault((record.engine, fold(record.world)), []).append(record)
    first: dict[tuple[str, str], int] = {}
    for number, column in enumerate(columns(run)):
        first.setdefault((column.engine, fold(column.world)), number)
    cells = {key: CellCounts(column=first[key], counted=tally(records)) for key, records in found.items()}
    known = dict.fromkeys(fold(world) for world in (*run.header.worlds, *(c.world for c in columns(run))))
    kinds = [*dict.fromkeys(map(_kind, known))]
    judged = {world for _, world in cells}
    worlds = tuple(sorted(judged, key=lambda world: (kinds.index(_kind(world)), len(world), world)))
    engines = dict.fromkeys(engine for engine, _ in first)
    return Overview(
        worlds=worlds, engines=tuple((e, tuple(cells.get((e, w)) for w in worlds)) for e in engines)
    )


def overview_lines(run: Run, width: int) -> list[str]:
    """Format the table in lines of ``width``; if it has more worlds than fit, it folds those of a kind, then all."""
    lines: list[str] = []
    for fold in (str, _kind, _all):
        lines = _aligned(overview(run, fold))
        if max(map(len, lines), default=0) <= width:
            break
    return lines


def _kind(world: str) -> str:
    return world.partition(":")[0]


def _all(world: str) -> str:
    return "all worlds"


def _aligned(found: Overview) -> list[str]:
    """Align names left and cells right; each kind of world stands once above its sizes."""
    if not found.engines:
        return []
    rows = [["engine", *(world.partition(":")[2] for world in found.worlds)]]
    rows += [
        [_short(engine), *(cell.text if cell else "" for cell in cells)] for engine, cells in found.engines
    ]
    name, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    kinds = [_kind(world) for world in found.worlds]
    above, start = " " * name, 0
    for kind, alike in groupby(kinds):
        end = start + len(list(alike))
        span = sum(widths[start:end]) + len(_GAP) * (end - start - 1)
        widths[start] += max(0, len(kind) - span)
        above += _GAP + kind.ljust(span)
        start = end
    return [above.rstrip(), *(_line(row, [name, *widths]) for row in rows)]


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
    return _GAP.join([row[0].ljust(widths[0]), *cells]).rstrip()


def _short(engine: str) -> str:
    """Return the last part of a long name, as of a class in a file."""
    name = one_line(engine)
    return name if len(name) <= _LONGEST_NAME else one_line(re.split(r"[/:]", name)[-1], limit=_LONGEST_NAME)
