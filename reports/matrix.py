"""A run as a matrix: columns of engine and world, rows of cases grouped by suite and folded by test."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.records.run import Run
from shardproof.reports.text import one_line
from shardproof.reports.verdict_style import MARKS


def by_test(cases: Iterable[str], *, limit: int | None = None) -> list[str]:
    """Name each test once, with its number of cases; for more than ``limit`` tests, only their number."""
    counts = Counter(case.partition("[")[0] for case in cases)
    names = []
    for test, count in counts.items():
        suite = test.split("/")[0] if "/" in test else ""
        name = one_line(f"{suite}/{label(test, suite)}" if suite else test)
        names.append(name if count == 1 else f"{name} ({count})")
    if limit is None or len(names) <= limit:
        return names
    return [*names[:limit], f"and {len(names) - limit} more"]


_PYTEST_ID = re.compile(r"test_(?P<file>\w+)\.py::test_(?P<law>\w+)(?P<parameters>\[.*\])?", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Column:
    """One engine in one world."""

    engine: str
    world: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseRow:
    """One case; ``cells`` has an entry for each column: no record, one, or (a problem) several."""

    case: str
    label: str
    cells: tuple[tuple[Record, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRows:
    """The rows of one suite."""

    suite: str
    rows: tuple[CaseRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """All records of a run, each in exactly one cell."""

    columns: tuple[Column, ...]
    suites: tuple[SuiteRows, ...]


def arrange(run: Run) -> Matrix:
    """Sort records into cells; engines and worlds in the header's order, cases by id,
    because parallel workers finish in any order."""
    found = columns(run)
    cells: dict[tuple[str, str], dict[Column, list[Record]]] = {}
    for record in run.records:
        row = cells.setdefault((record.suite, record.case), {})
        row.setdefault(Column(engine=record.engine, world=record.world), []).append(record)
    suites: dict[str, list[CaseRow]] = {}
    for (suite, case), row in sorted(cells.items()):
        arranged = tuple(tuple(row.get(column, ())) for column in found)
        suites.setdefault(suite, []).append(CaseRow(case=case, label=label(case, suite), cells=arranged))
    return Matrix(
        columns=found, suites=tuple(SuiteRows(suite=s, rows=tuple(rows)) for s, rows in suites.items())
    )


def columns(run: Run) -> tuple[Column, ...]:
    """Return the engines and worlds that have records, in the header's order."""
    engines, worlds = _ranking(run.header.engines), _ranking(run.header.worlds)
    present = {Column(engine=record.engine, world=record.world) for record in run.records}
    last = len(engines) + len(worlds)  # merged or edited runs may contain more than their header announces
    return tuple(
        sorted(
            present, key=lambda c: (engines.get(c.engine, last), c.engine, worlds.get(c.world, last), c.world)
        )
    )


def by_severity(records: Iterable[Record]) -> list[Record]:
    """Sort the records that need attention first; records with one verdict stay in order."""
    order = {verdict: position for position, verdict in enumerate(_SEVERITY)}
    return sorted(records, key=lambda record: order[record.verdict])


def label(case: str, suite: str) -> str:
    """Shorten a case's id to the part that distinguishes it within its suite."""
    rest = case.removeprefix(f"{suite}/")
    found = _PYTEST_ID.fullmatch(rest)
    return f"{found['file']}::{found['law']}{found['parameters'] or ''}" if found else rest


_SEVERITY = (
    *(v for v in MARKS if not v.is_conforming),
    *(v for v in MARKS if v.is_conforming and v is not Verdict.PASSED),
    Verdict.PASSED,
)


def _ranking(names: tuple[str, ...]) -> dict[str, int]:
    return {name: position for position, name in reversed(list(enumerate(names)))}
