"""Coverage: which cases cover which row of a table, with their verdicts in runs. No pytest here.

The tables are files beside the suites. A row names its cases by patterns, or a test names its rows by a mark:
``@pytest.mark.rows("T07", "R05", ...)`` of upstream tests, ``@pytest.mark.api("no_sync", ...)`` of an interface.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from shardproof.harness.audit.marks import PytestMark
from shardproof.harness.cases.case_id import SUITES
from shardproof.harness.errors import UsageError
from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.verdicts.known_failures import matches

TESTS = "tests"  # the table of upstream tests; others are of interfaces

# The worst for an engine first; the conforming ones come last.
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


class Kind(Enum):
    """The kinds of engines or machines that can show a row; the value is the word before the colon in a table."""

    OBSERVABLE = ""  # any engine, on any machine
    INTERNAL = "internal"  # no other engine: it is about names, private objects or kernels
    DEVICE = "device"  # engines on a GPU alone
    NEWER = "newer"  # engines of releases after torch 2.13 alone


class RowState(Enum):
    """How far a row is covered; of rows that any engine could show, each is one of the first three."""

    COVERED = "covered"
    IN_PART = "in part"
    OPEN = "open"
    NEWER = "newer"
    DEVICE = "device"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A test of torch's own, or a name of an interface."""

    id: str  # short, such as T07 or no_sync
    test: str  # of a test the class and the test, of an interface the name in full; "+2" stands for two more
    promise: str  # of any engine
    file: str = ""  # of torch's
    kind: Kind = Kind.OBSERVABLE
    why: str = ""  # it is of that kind
    missing: str = ""  # what no case checks yet
    # Of case ids (a path, a test of it, or one case; * is any text); or choices of a program, joined by commas.
    patterns: tuple[str, ...] = ()

    @property
    def num_tests(self) -> int:
        """Count the tests of the row."""
        more = re.search(r" \+(\d+)$", self.test)
        return 1 + (int(more[1]) if more else 0)

    def names(self, case: str, choices: Collection[str] = ()) -> bool:
        """Whether one of the row's patterns matches this case, or its program makes all choices of one."""
        return any(_matches(pattern, case, choices) for pattern in self.patterns)

    def state(self, *, has_cases: bool) -> RowState:
        """Return how far the row is covered."""
        if self.kind is Kind.OBSERVABLE or (self.kind is Kind.NEWER and has_cases and not self.missing):
            if has_cases:
                return RowState.IN_PART if self.missing else RowState.COVERED
            return RowState.OPEN
        return RowState(self.kind.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows, the mark by which a case covers one, and the names of both."""

    mark: str
    rows: Sequence[Row]
    column: str  # what is in the column of whole names
    ids: str
    example: str  # of the mark
    command: str  # that lists the rows

    def rows_of(self, marks: Iterable[PytestMark], *, where: str) -> tuple[str, ...]:
        """Read all marks of this table together; raises UsageError for an unknown row."""
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
    """The combined verdict of one engine's records for a row; None if none of its cases was run."""

    verdict: Verdict | None
    num_judged: int  # of the row's cases; fewer than there are, where the run had no world for some


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCoverage:
    """One row with the cases that cover it, and a verdict per engine in the order of the table."""

    row: Row
    cases: tuple[str, ...]
    verdicts: tuple[RowVerdict, ...]
    num_mutants: int = 0  # that the cases' marks name
    num_killed: int | None = None  # of those, by the cases, in a run of mutants; None without one

    @property
    def has_passed(self) -> bool:
        """Whether the row's verdict is PASSED for one of the engines."""
        return any(found.verdict is Verdict.PASSED for found in self.verdicts)

    @property
    def state(self) -> RowState:
        """How far the row is covered."""
        return self.row.state(has_cases=bool(self.cases))


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Every row of a table."""

    table: Table
    engines: tuple[str, ...]
    rows: tuple[RowCoverage, ...]

    @property
    def missing(self) -> tuple[Row, ...]:
        """Rows that a case could cover, and none does."""
        return tuple(found.row for found in self.rows if found.state is RowState.OPEN)

    @property
    def observable(self) -> tuple[RowCoverage, ...]:
        """Rows that some engine can show on a CPU."""
        beyond = {RowState.NEWER, RowState.DEVICE, RowState.INTERNAL}
        return tuple(found for found in self.rows if found.state not in beyond)

    def num_passed(self, engine: str, file: str | None = None) -> int:
        """Count the rows, of one file or of all, whose verdict for this engine is PASSED."""
        place = self.engines.index(engine)
        found = (row for row in self.rows if file in {None, row.row.file})
        return sum(row.verdicts[place].verdict is Verdict.PASSED for row in found)

    def num_rows(self, state: RowState, file: str | None = None) -> int:
        """Count the rows, of one file or of all, that are covered so far."""
        return sum(row.state is state for row in self.rows if file in {None, row.row.file})


def read_tables() -> Mapping[str, Table]:
    """Read the tables that ship with the suites; each is named after its file."""
    return {file.stem: read_table(file) for file in sorted((SUITES / "upstream").glob("*.toml"))}


def read_table(file: Path) -> Table:
    """Read one table: the names of its mark and columns, and the rows of each of torch's files."""
    written = tomllib.loads(file.read_text(encoding="utf-8"))
    rows = [
        _row(id, name, *texts) for name, rows in written.pop("files").items() for id, texts in rows.items()
    ]
    return Table(**written, rows=rows)


def check_patterns(table: Table, cases: Mapping[str, Collection[str]]) -> None:
    """Raise UsageError for patterns that match no case; ``cases`` are as for `cover`."""
    for row in table.rows:
        for pattern in row.patterns:
            if not any(_matches(pattern, case, named) for case, named in cases.items()):
                known = [*dict.fromkeys(case.partition("[")[0] for case in cases)]
                raise UsageError(
                    f"row {row.id} of {table.mark}",
                    expected="patterns of cases",
                    got=repr(pattern),
                    hint=", ".join(difflib.get_close_matches(pattern, known, n=1))
                    or "`shardproof list --cases`",
                )


def _row(id: str, file: str, test: str, promise: str, *notes: str) -> Row:
    """Read a row: notes are patterns, what is open, or a kind with its reason."""
    texts = {word: text for word, colon, text in (note.partition(": ") for note in notes) if colon}
    kinds = [kind for kind in Kind if kind.value in texts]
    return Row(
        id=id,
        file=file,
        test=test,
        promise=promise,
        kind=kinds[0] if kinds else Kind.OBSERVABLE,
        why=texts[kinds[0].value] if kinds else "",
        missing=texts.get("open", ""),
        patterns=tuple(note for note in notes if ": " not in note),
    )


def _matches(pattern: str, case: str, choices: Collection[str] = ()) -> bool:
    if "=" in pattern:
        return set(pattern.split(",")) <= set(choices)
    path, _, test = case.partition("::")
    name = test.partition("[")[0]
    return any(matches(pattern, part) for part in (path, f"{path}::{name}", case))


def cover(
    table: Table,
    cases: Mapping[str, Collection[str]],
    records: Sequence[Record],
    mutants: Mapping[str, Collection[str]] | None = None,
    killed: Mapping[str, Collection[str]] | None = None,
) -> Coverage:
    """Join the rows of a table with cases and with their verdicts in runs.

    ``cases`` are the rows that each names by a mark and the choices of its program, if it has one; ``mutants`` are
    those that it must kill, ``killed`` those that it has killed.
    """
    engines = tuple(dict.fromkeys(record.engine for record in records))
    verdicts: dict[tuple[str, str], list[Verdict]] = {}
    for record in records:
        verdicts.setdefault((record.engine, record.case), []).append(record.verdict)
    covered = []
    for row in table.rows:
        standing = tuple(sorted(c for c, named in cases.items() if row.id in named or row.names(c, named)))
        judged = [[v for case in standing if (v := verdicts.get((e, case)))] for e in engines]
        of_engines = tuple(
            RowVerdict(verdict=judge_row([v for some in lists for v in some]), num_judged=len(lists))
            for lists in judged
        )
        named = {mutant for case in standing for mutant in (mutants or {}).get(case, ())}
        found = {mutant for case in standing for mutant in (killed or {}).get(case, ())}
        covered.append(
            RowCoverage(
                row=row,
                cases=standing,
                verdicts=of_engines,
                num_mutants=len(named),
                num_killed=None if killed is None else len(named & found),
            )
        )
    return Coverage(table=table, engines=engines, rows=tuple(covered))


def judge_row(verdicts: Collection[Verdict]) -> Verdict | None:
    """Return the worst of the verdicts of a row's cases; None if there are none."""
    return min(verdicts, key=_WORST_FIRST.index, default=None)


def _near(row: str, known: Sequence[str]) -> str:
    padded = f"{row[:1].upper()}{row[1:].zfill(2)}"  # T7 is as near to T37 as to T07
    near = [padded] if padded in known else difflib.get_close_matches(row, known, n=1, cutoff=0.4)
    return repr(near[0]) if near else ""
