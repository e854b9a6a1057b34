"""Coverage: which cases stand for which line of a table, and what a run says of each. No pytest here.

A suite's test says ``@pytest.mark.rows("T07", "R05", ...)`` of upstream tests, ``@pytest.mark.api("no_sync", ...)`` of
an interface. The tables are files beside the suites.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardproof.harness.audit.marks import PytestMark
from shardproof.harness.cases.case_id import SUITES
from shardproof.harness.errors import UsageError
from shardproof.harness.records.record import Record, Verdict

TESTS = "tests"  # the table of upstream tests; others are of interfaces

# What is worst for an engine first; after these come the ones that conform.
_WORST_FIRST = (
    Verdict.FAILED,
    Verdict.CRASHED,
    Verdict.HUNG,
    Verdict.UNSUPPORTED_SILENT,
    Verdict.UNEXPECTED_PASS,
    Verdict.VACUOUS,
    Verdict.ERRORED,
    Verdict.NOT_RUN,
    Verdict.KNOWN_FAILURE,  # known, but a failure: a row with one has not passed
    Verdict.PASSED,
    Verdict.UNSUPPORTED,  # the row's verdict only where nothing else was judged
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A test of torch's own, or a name of an interface; suites say by marks which of their tests stand for it."""

    id: str  # short, such as T07 or no_sync
    test: str  # of a test the class and the test, of an interface the name in full
    promise: str  # of any engine
    file: str = ""  # of torch's
    why_gpu: str = ""  # why only a GPU can show it; empty where any machine can


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows that cases stand for, the mark by which these say so, and what both are called."""

    mark: str
    rows: Sequence[Row]
    column: str  # what is in the column of whole names
    ids: str
    example: str  # of the mark
    command: str  # that lists the rows

    def rows_of(self, marks: Iterable[PytestMark], *, where: str) -> tuple[str, ...]:
        """Read this table's marks, all of them together; raises UsageError for what is no row."""
        known = [row.id for row in self.rows]
        found: dict[str, None] = {}
        for mark in marks:
            if mark.kwargs or not mark.args:
                raise self._refusal(where, f"{self.mark}() without one, or with names", self.example)
            for row in mark.args:
                if row not in known:
                    raise self._refusal(where, repr(row), _near(str(row), known) or f"`{self.command}`")
                found[row] = None
        return tuple(found)

    def _refusal(self, where: str, got: str, hint: str) -> UsageError:
        expected = f"{self.ids}, such as {self.rows[0].id!r}"
        return UsageError(f"the {self.mark} mark of {where}", expected=expected, got=got, hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowVerdict:
    """What one engine's records add up to for a row; None where none of its cases was run."""

    verdict: Verdict | None
    num_judged: int  # of the row's cases; fewer than there are, where the run had no world for some


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCoverage:
    """One row with the cases that stand for it, and a verdict per engine in the order of the table."""

    row: Row
    cases: tuple[str, ...]
    verdicts: tuple[RowVerdict, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Every row of a table."""

    table: Table
    engines: tuple[str, ...]
    rows: tuple[RowCoverage, ...]

    @property
    def missing(self) -> tuple[Row, ...]:
        """Rows that no case stands for."""
        return tuple(found.row for found in self.rows if not found.cases)

    def num_passed(self, engine: str) -> int:
        """Count the rows whose verdict for this engine is PASSED."""
        place = self.engines.index(engine)
        return sum(found.verdicts[place].verdict is Verdict.PASSED for found in self.rows)


def read_tables() -> Mapping[str, Table]:
    """Read the tables that ship with the suites; each goes by the name of its file."""
    return {file.stem: read_table(file) for file in sorted((SUITES / "upstream").glob("*.toml"))}


def read_table(file: Path) -> Table:
    """Read one table: of what its mark and columns are called, and the rows of each of torch's files."""
    written = tomllib.loads(file.read_text(encoding="utf-8"))
    rows = [
        Row(id=id, file=name, **dict(zip(("test", "promise", "why_gpu"), texts, strict=False)))
        for name, section in written.pop("files").items()
        for id, texts in section.items()
    ]
    return Table(**written, rows=rows)


def cover(table: Table, cases: Mapping[str, Collection[str]], records: Sequence[Record]) -> Coverage:
    """Join a table's rows with cases that name them, ``cases`` giving the rows of each, and with what runs say."""
    engines = tuple(dict.fromkeys(record.engine for record in records))
    verdicts: dict[tuple[str, str], list[Verdict]] = {}
    for record in records:
        verdicts.setdefault((record.engine, record.case), []).append(record.verdict)
    covered = []
    for row in table.rows:
        standing = tuple(sorted(case for case, named in cases.items() if row.id in named))
        judged = [[v for case in standing if (v := verdicts.get((e, case)))] for e in engines]
        of_engines = tuple(
            RowVerdict(verdict=judge_row([v for found in lists for v in found]), num_judged=len(lists))
            for lists in judged
        )
        covered.append(RowCoverage(row=row, cases=standing, verdicts=of_engines))
    return Coverage(table=table, engines=engines, rows=tuple(covered))


def judge_row(verdicts: Collection[Verdict]) -> Verdict | None:
    """Return what verdicts of a row's cases add up to: the worst of them; None for none at all."""
    return min(verdicts, key=_WORST_FIRST.index, default=None)


def _near(row: str, known: Sequence[str]) -> str:
    padded = f"{row[:1].upper()}{row[1:].zfill(2)}"  # T7 is as near to T37 as to T07
    near = [padded] if padded in known else difflib.get_close_matches(row, known, n=1, cutoff=0.4)
    return repr(near[0]) if near else ""
