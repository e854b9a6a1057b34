"""The progress of a run instead of pytest's dots: a bar on a terminal, lines in a pipe, failures at once."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

from shardproof.harness.cases.case_id import Node
from shardproof.harness.cli.screen import styled, width
from shardproof.harness.records.record import Record, from_json
from shardproof.harness.runner.record_writer import LEFT_OUT_PROPERTY, RECORD_PROPERTY

if TYPE_CHECKING:  # importing them takes a while, and not every command needs them
    import pytest
    from rich.progress import Progress, TaskID

_PARTS = 10  # lines of a long run in a pipe, in addition to those of failures
_ALIKE = 10  # of an engine's first cases, after which the other ones hardly end otherwise
_INDENT = " " * 11
# Names stay whole, because they are copied. Any: settings of several types.
_LINES: Mapping[str, Any] = {
    "subsequent_indent": _INDENT,
    "break_long_words": False,
    "break_on_hyphens": False,
}


class CaseProgress:
    """A pytest plugin that prints the verdicts of cases, and an estimate of the time left.

    ``lists_all`` writes a line for each case, else only for those that do not conform; ``is_quiet`` writes
    nothing but errors. No case begins after ``limit_s``.
    """

    def __init__(self, *, lists_all: bool = False, is_quiet: bool = False, limit_s: float = math.inf) -> None:
        self._lists_all, self._is_quiet = lists_all, is_quiet
        self._num_cases = self._num_ended = self._num_red = 0
        self._num_alike = Counter[tuple[str, str]]()  # by engine and cause
        self._has_cells = False  # several engines or worlds
        self.is_interrupted = False  # by Ctrl-C; pytest ends alike for other reasons
        self._started_s = time.monotonic()
        self._ends_at = self._started_s + limit_s
        self._bar: _Bar | None = None
        self._terminal: Any = None  # pytest does not export its type

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without xdist: count the session's own cases."""
        self._begin(session.config, [item.nodeid for item in session.items])

    # Any: xdist's node, whose package may not be installed.
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """With xdist: every worker collects the same cases."""
        self._begin(node.config, ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Print why a file of cases cannot be imported: pytest's own section of errors is off."""
        if report.failed:
            self._print(report.longreprtext)

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Count as pytest does, but print no letter."""
        return (report.outcome, "", "") if report.when == "call" else None

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Show which case runs; of several at a time, the last to begin."""
        node = Node.parse(nodeid)
        if self._bar is not None and node is not None:
            red = f"{self._num_red} red; " if self._num_red else ""
            self._bar.show(f"{red}{node.engine} in {node.world}: {node.case}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print the line of a case, or an error of its setup or teardown."""
        if report.when != "call":
            if report.failed:
                self._print(report.longreprtext)
            return
        node = Node.parse(report.nodeid)
        if node is None or self._terminal is None:
            return
        self._num_ended += 1
        if self._bar is not None:
            self._bar.advance()
        outcome, conforms, cause = _outcome(report)
        self._num_red += not conforms
        self._num_alike[node.engine, cause] += 1
        is_new = not conforms and self._num_alike[node.engine, cause] == 1
        if self._lists_all or is_new:
            self._write(self._line(node, outcome, report.duration))
        elif self._bar is None and self._num_ended % max(1, self._num_cases // _PARTS) == 0:
            self._write(f"{self._count()}  {'; '.join(['cases', *self._state()])}")
        of_engine = sum(n for (engine, _), n in self._num_alike.items() if engine == node.engine)
        if not conforms and of_engine == self._num_alike[node.engine, cause] == _ALIKE:
            self._write(f"{node.engine}: the first {_ALIKE} cases end alike; is it broken? Ctrl-C keeps them")

    # Any: pytest does not export the type of what it caught.
    def pytest_keyboard_interrupt(self, excinfo: Any) -> None:
        """Note Ctrl-C; pytest.exit() ends a session alike."""
        self.is_interrupted |= issubclass(excinfo.type, KeyboardInterrupt)

    def pytest_unconfigure(self) -> None:
        """Remove the bar, however the session ended."""
        if self._bar is not None:
            self._bar.end()
            self._bar = None

    def _begin(self, config: pytest.Config, cases: Sequence[str]) -> None:
        self._terminal = config.pluginmanager.getplugin("terminalreporter")
        self._num_cases, self._started_s = len(cases), time.monotonic()
        self._has_cells = len({(n.engine, n.world) for case in cases if (n := Node.parse(case))}) > 1
        if self._bar is None and not self._is_quiet and sys.stdout.isatty():
            self._bar = _Bar(len(cases))

    def _line(self, node: Node, outcome: str, duration_s: float) -> str:
        name = node.case
        if self._lists_all:
            name = node.case.rpartition("::test_")[2].partition("[")[0].replace("_", " ")
        if self._has_cells:
            name += f", {node.engine} in {node.world}"
        took = "; ".join([f"{outcome} in {duration_s:.1f} s", *(() if self._bar else self._state())])
        return f"{self._count()}  {took}: {name}"

    def _count(self) -> str:
        return f"{f'{self._num_ended} of {self._num_cases}':>{len(_INDENT) - 2}}"

    def _state(self) -> Iterator[str]:
        """Yield how many cases did not conform so far, and how long the others will take."""
        if self._num_red:
            yield f"{self._num_red} red"
        if left := self._num_cases - self._num_ended:
            now = time.monotonic()
            left_s = min((now - self._started_s) / self._num_ended * left, self._ends_at - now)
            yield f"about {max(0.0, left_s):.0f} s left"

    def _write(self, line: str) -> None:
        if not self._is_quiet:
            self._print(fill(line, width(), **_LINES))

    def _print(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line)
        elif self._terminal is not None:
            self._terminal.write_line(line)
        else:
            print(line, file=sys.stderr)


class _Bar:
    """A bar on the terminal, drawn by a thread: the current case, the counts, and the time left."""

    def __init__(self, num_cases: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.table import Column

        # A descriptor of its own: pytest redirects the usual one while a case runs, and the thread draws then too.
        self._file = os.fdopen(os.dup(sys.__stdout__.fileno()), "w") if sys.__stdout__ else sys.stdout
        self._progress: Progress = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
            console=Console(file=self._file, highlight=False),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            expand=True,
        )
        self._task: TaskID = self._progress.add_task("", total=num_cases)
        self._progress.start()

    def show(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def advance(self) -> None:
        self._progress.advance(self._task)

    def write(self, line: str) -> None:
        self._progress.console.print(styled(line), soft_wrap=True)

    def end(self) -> None:
        self._progress.stop()
        self._file.close()


class _Outcome(NamedTuple):
    """How a case ended, whether it conforms, and what is alike in cases that fail alike."""

    text: str
    conforms: bool
    cause: str = ""


def _outcome(report: pytest.TestReport) -> _Outcome:
    for name, value in report.user_properties:
        if name == RECORD_PROPERTY:
            from shardproof.reports.causes import shape

            record: Record = from_json(Record, str(value), where=report.nodeid)
            cause = "" if record.verdict.is_conforming else f"{record.verdict} {shape(record.headline)}"
            return _Outcome(str(record.verdict), record.verdict.is_conforming, cause)
        if name == LEFT_OUT_PROPERTY:
            return _Outcome("does not apply", True)
    return _Outcome(report.outcome, not report.failed, report.outcome)
