"""The command ``shardproof coverage``: collect the cases with their rows, read runs, print a table."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from shardproof.harness.audit.marks import read_selection
from shardproof.harness.audit.shipped_mutants import killed_in
from shardproof.harness.audit.upstream_coverage import TESTS, Table, check_patterns, cover, read_tables
from shardproof.harness.cases.case_id import Node
from shardproof.harness.cli.case_list import collect_cases
from shardproof.harness.cli.exit_codes import CONFORMS, DOES_NOT_CONFORM, OUR_FAULT, PYTEST_USAGE, USAGE
from shardproof.harness.cli.subcommand import Subcommand
from shardproof.harness.errors import UsageError
from shardproof.harness.records.run import read_run

if TYPE_CHECKING:  # importing pytest takes a while, and not every command needs it
    import pytest


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="DIR", nargs="*", help="folders of runs, whose verdicts are shown")
    parser.add_argument("--api", metavar="NAME", help="lines of this interface instead of tests: fsdp1")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")


def _run(arguments: argparse.Namespace) -> int:
    """Show which cases cover each of torch's own tests, with their verdicts; returns 1 if a test has no case.

    With --api the same for each name of one of torch's interfaces.
    """
    from shardproof.reports.coverage_table import render, render_markdown

    table = _table(arguments.api)
    folders = [Path(folder) for folder in arguments.runs]
    runs = [read_run(folder) for folder in folders if read_selection(folder) is None]
    records = [record for run in runs for record in run.records]
    found = _CasesWithRows(table)
    if code := collect_cases(found):
        return USAGE if code == PYTEST_USAGE else OUR_FAULT
    check_patterns(table, found.rows)
    covered = cover(table, found.rows, records, found.mutants, killed_in(folders))
    print(render_markdown(covered) if arguments.markdown else render(covered))
    damage = [problem for run in runs if run.is_damaged for problem in run.problems]
    for problem in damage:
        print(f"warning: {problem}", file=sys.stderr)
    return DOES_NOT_CONFORM if covered.missing or damage else CONFORMS


class _CasesWithRows:
    """A pytest plugin that records the rows, the choices of the program, and the mutants to kill of every case."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self.rows: dict[str, set[str]] = {}
        self.mutants: dict[str, set[str]] = {}

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Record one case, for whatever sizes of worlds; its marks are not checked yet, so they may have any value."""
        node = Node.parse(item.nodeid)
        callspec = getattr(item, "callspec", None)  # of parametrized cases
        if node is not None:
            program = callspec.params.get("program", "") if callspec else ""
            named = {str(row) for mark in item.iter_markers(self._table.mark) for row in mark.args}
            named.update(str(program).split(","))
            self.rows.setdefault(node.case, set()).update(named)
            killed = {str(name) for mark in item.iter_markers("kills") for name in mark.args}
            self.mutants.setdefault(node.case, set()).update(killed)


def _table(api: str | None) -> Table:
    tables = read_tables()
    interfaces = tables.keys() - {TESTS}
    if api is not None and api not in interfaces:
        known = ", ".join(sorted(interfaces))
        raise UsageError("--api", expected=f"one of: {known}", got=repr(api), hint="leaving it out for tests")
    return tables[api or TESTS]


COMMAND = Subcommand(
    help="show which of torch's own tests the cases cover",
    place=12,
    add_arguments=_add_arguments,
    run=_run,
)
