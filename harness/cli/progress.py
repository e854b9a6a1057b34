"""A line for each case of a check as it ends, with the time that is left: a pytest plugin, in place of dots."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardproof.harness.cases.case_id import Node
from shardproof.harness.records.record import Record, from_json
from shardproof.harness.runner.record_writer import LEFT_OUT_PROPERTY, RECORD_PROPERTY

if TYPE_CHECKING:  # importing pytest takes a while, and not every command needs it
    import pytest


class Progress:
    """Writes which case ended how, and about how long the others will take."""

    def __init__(self) -> None:
        self._num_cases = self._num_ended = 0
        self._started_s = time.monotonic()
        self._terminal: Any = None  # pytest does not export its type

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without xdist: count the session's own cases."""
        self._begin(session.config, session.items)

    # Any: xdist's node, whose package need not be there.
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """With xdist: every worker collects the same."""
        self._begin(node.config, ids)

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Count as pytest does, and write no letter."""
        return (report.outcome, "", "") if report.when == "call" else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the line of a case."""
        node = Node.parse(report.nodeid)
        if report.when != "call" or node is None or self._terminal is None:
            return
        self._num_ended += 1
        name = node.case.rpartition("::test_")[2].partition("[")[0].replace("_", " ")
        of = f"{self._num_ended} of {self._num_cases}"
        left = self._num_cases - self._num_ended
        spent = time.monotonic() - self._started_s
        soon = f"; about {spent / self._num_ended * left:.0f} s left" if left else ""
        self._terminal.write_line(
            f"{of:>9}  {node.engine} in {node.world}: {name}: {_outcome(report)}, {report.duration:.1f} s{soon}"
        )

    def _begin(self, config: pytest.Config, cases: Sequence[object]) -> None:
        self._terminal = config.pluginmanager.getplugin("terminalreporter")
        self._num_cases, self._started_s = len(cases), time.monotonic()


def _outcome(report: pytest.TestReport) -> str:
    for name, value in report.user_properties:
        if name == RECORD_PROPERTY:
            return str(from_json(Record, str(value), where=report.nodeid).verdict)
        if name == LEFT_OUT_PROPERTY:
            return "does not apply"
    return report.outcome
