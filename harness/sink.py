"""The sink: a pytest plugin object that turns reports into the records of a run, as they arrive."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.node import Node
from harness.provenance import footer, header
from harness.record import Record, from_json
from harness.run_directory import RunWriter
from harness.trial import Cell
from harness.verdict import Verdict

__all__ = ["RECORD_PROPERTY", "Sink"]

RECORD_PROPERTY = "shardproof.record"  # the user property under which a test's report carries its record


class Sink:
    """Writes each record as its report arrives; one process, so that lines never interleave.

    Without ``out`` it only counts verdicts.
    """

    def __init__(self, config: pytest.Config, cells: Sequence[Cell], out: Path | None) -> None:
        self._config = config
        self._cells = cells
        self._out = out
        self._writer: RunWriter | None = None
        self._expected: list[Node] = []
        self._records: list[Record] = []
        self._started_s = time.monotonic()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without xdist: the session's own items."""
        self._open([item.nodeid for item in session.items])

    # Any: xdist's node, whose package need not be there.
    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """With xdist: every worker collects the same; the first to say so opens the run."""
        self._open(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the record that a test's report carries."""
        if report.when != "call":
            return
        for name, value in report.user_properties:
            if name == RECORD_PROPERTY:
                self._append(from_json(Record, str(value), where=report.nodeid))

    def pytest_sessionfinish(self) -> None:
        """Record what was selected and never reached, and write the footer."""
        if self._writer is None:
            return
        for record in self._not_run():
            self._append(record)
        verdicts = [record.verdict for record in self._records]
        self._writer.finish(footer(verdicts=verdicts, duration_s=time.monotonic() - self._started_s))

    # Any: pytest does not export the terminal reporter's type.
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say the verdicts in one line, and where the run is kept."""
        if not self._records:
            return
        counts = ", ".join(f"{n} {v}" for v in Verdict if (n := sum(r.verdict is v for r in self._records)))
        kept = f"; kept in {self._out}" if self._out else ""
        terminalreporter.write_line(f"verdicts: {counts}{kept}")

    def _append(self, record: Record) -> None:
        self._records.append(record)
        if self._writer is not None:
            self._writer.append(record)

    def _open(self, nodeids: Sequence[str]) -> None:
        nodes = [node for nodeid in nodeids if (node := Node.parse(nodeid)) is not None]
        is_dry = self._config.option.collectonly
        if self._writer is not None or not nodes or self._out is None or is_dry:
            return
        self._expected = nodes
        self._writer = RunWriter(
            self._out,
            header(
                command=_as_typed(),
                engines=tuple(dict.fromkeys(c.engine for c in self._cells)),
                worlds=tuple(dict.fromkeys(str(c.world) for c in self._cells)),
                seed=0,
                num_cases=len(nodes),
            ),
        )

    def _not_run(self) -> Iterator[Record]:
        seen = {(r.engine, r.case, r.world) for r in self._records}
        for node in self._expected:
            if node.key not in seen:
                yield Record(
                    engine=node.engine,
                    case=node.case,
                    world=node.world,
                    verdict=Verdict.NOT_RUN,
                    headline="selected, but the run ended or the test broke before it gave a verdict",
                    suite=node.suite,
                    engine_version="",
                    command=node.command,
                )


def _as_typed() -> str:
    """Spell the command line of this process, under the name by which it is called."""
    program = Path(sys.argv[0]).name
    called = {"cli.py": "shardproof", "__main__.py": "pytest"}.get(program, program)
    return shlex.join([called, *sys.argv[1:]])
