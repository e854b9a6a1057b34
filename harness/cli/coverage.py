"""The command ``shardproof coverage``: collect the cases with their rows, read runs, print a table."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from shardproof.harness.audit.kill_matrix import MutantStatus, kill_matrix
from shardproof.harness.audit.marks import read_selection
from shardproof.harness.audit.upstream_coverage import (
    TESTS,
    Coverage,
    Table,
    check_patterns,
    cover,
    read_tables,
)
from shardproof.harness.cases.case_id import Node
from shardproof.harness.cli.case_list import collect_cases
from shardproof.harness.cli.exit_codes import CONFORMS, DOES_NOT_CONFORM, OUR_FAULT, PYTEST_USAGE, USAGE
from shardproof.harness.cli.mutants import shipped
from shardproof.harness.errors import UsageError
from shardproof.harness.records.run import read_run
from shardproof.reports.coverage_table import render, render_markdown

__all__ = ["killed_in", "show_coverage"]


class _CasesWithRows:
    """A pytest plugin that records the rows, the choices of the program, and the mutants to kill of every case."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self.rows: dict[str, set[str]] = {}
        self.mutants: dict[str, set[str]] = {}

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Record one case, for whatever sizes of worlds; its marks are not checked yet, so they may have any value."""
        node = Node.parse(item.nodeid)
        if node is not None:
            program = item.callspec.params.get("program", "") if isinstance(item, pytest.Function) else ""
            named = {str(row) for mark in item.iter_markers(self._table.mark) for row in mark.args}
            named.update(str(program).split(","))
            self.rows.setdefault(node.case, set()).update(named)
            killed = {str(name) for mark in item.iter_markers("kills") for name in mark.args}
            self.mutants.setdefault(node.case, set()).update(killed)


def show_coverage(folders: Sequence[Path], *, api: str | None, is_markdown: bool) -> int:
    """Print which cases cover each row, with their verdicts in the runs; returns 1 if a row has no case.

    The rows are the names of the interface ``api``, or torch's own tests if it is None. Raises UsageError if there is
    no such interface.
    """
    table = _table(api)
    runs = [read_run(folder) for folder in folders if read_selection(folder) is None]
    records = [record for run in runs for record in run.records]
    found = _CasesWithRows(table)
    if code := collect_cases(found):
        return USAGE if code == PYTEST_USAGE else OUR_FAULT
    check_patterns(table, found.rows)
    covered = cover(table, found.rows, records, found.mutants, killed_in(folders))
    print(_rendered(covered, is_markdown=is_markdown))
    damage = [problem for run in runs if run.is_damaged for problem in run.problems]
    for problem in damage:
        print(f"warning: {problem}", file=sys.stderr)
    return DOES_NOT_CONFORM if covered.missing or damage else CONFORMS


def killed_in(folders: Sequence[Path]) -> Mapping[str, set[str]] | None:
    """Return the mutants that each case killed, from the folders of `shardproof mutants`; None without any."""
    selections = [
        (folder, selection) for folder in folders if (selection := read_selection(folder)) is not None
    ]
    killed: dict[str, set[str]] = {}
    for folder, selection in selections:
        matrix = kill_matrix(shipped(), selection, read_run(folder).records, is_whole=False)
        for result in matrix.results:
            if result.status is MutantStatus.KILLED:
                killed.setdefault(result.pair.case, set()).add(result.pair.mutant)
    return killed if selections else None


def _table(api: str | None) -> Table:
    tables = read_tables()
    interfaces = tables.keys() - {TESTS}
    if api is not None and api not in interfaces:
        known = ", ".join(sorted(interfaces))
        raise UsageError("--api", expected=f"one of: {known}", got=repr(api), hint="leaving it out for tests")
    return tables[api or TESTS]


def _rendered(covered: Coverage, *, is_markdown: bool) -> str:
    return render_markdown(covered) if is_markdown else render(covered)
