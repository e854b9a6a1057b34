"""The record writer: a pytest plugin object that turns reports into the records of a run, as they arrive."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from shardproof.harness.cases.case_id import Catalogue, Node, check_command
from shardproof.harness.errors import UsageError
from shardproof.harness.records.diff.comparability import ComparedRun
from shardproof.harness.records.joining import carried, refuse_other_cases, refuse_unlike
from shardproof.harness.records.proof import Unproven, unjudged, unproven
from shardproof.harness.records.provenance import footer, header
from shardproof.harness.records.record import (
    MOST_LISTED,
    Expectations,
    Header,
    LeftOut,
    Record,
    UnusedExpectation,
    Verdict,
    from_json,
)
from shardproof.harness.records.run import Run, RunWriter
from shardproof.harness.runner.cell import Cell
from shardproof.harness.runner.interruption import uninterrupted
from shardproof.harness.runner.options import RunOptions
from shardproof.harness.runner.session_end import end_session, exit_code
from shardproof.harness.runner.time_limit import ENDS_AT, KILLS, KILLS_FROM_WORKER, powers
from shardproof.harness.torch_compat.releases import remark
from shardproof.harness.verdicts.known_failures import Ran, unused
from shardproof.harness.worlds.launched.cluster import cluster
from shardproof.harness.worlds.processes.forkserver import hash_seeds

RECORD_PROPERTY = "shardproof.record"  # the user property under which a test's report carries its record
LEFT_OUT_PROPERTY = "shardproof.left_out"  # likewise the reason why a case does not apply
NOT_JUDGED_PROPERTY = "shardproof.not_judged"  # likewise the reason why a case was not judged again
FROM_WORKER = "shardproof.catalogue"  # the key under which a worker of xdist sends what it collected
CATALOGUE = pytest.StashKey[Catalogue]()
UNAVAILABLE = pytest.StashKey[dict[str, str]]()  # engines that cannot be judged, with the cause
UNAVAILABLE_FROM_WORKER = "shardproof.unavailable"
IS_PART = pytest.StashKey[bool]()  # other runs have the rest of the selected cases, possibly all
NUM_SELECTED = pytest.StashKey[int]()  # cases of all shards
PART_FROM_WORKER = "shardproof.part"
LEFT_OUT = pytest.StashKey[dict[str, str]]()  # node ids of cases that fit no world here, with the cause
LEFT_OUT_FROM_WORKER = "shardproof.left_out"


class RecordWriter:
    """Writes each record as its report arrives; one process, so that lines never interleave.

    Without ``out`` it only counts verdicts.
    """

    def __init__(
        self,
        config: pytest.Config,
        cells: Sequence[Cell],
        expectations: Expectations | None,
        out: Path | None,
        effort: RunOptions,
        options: dict[str, str] | None = None,
    ) -> None:
        self._config = config
        self._cells = cells
        self._expectations = expectations
        self._out = out
        self._effort = effort
        self._options = options or {}
        self._resumed: ComparedRun | None = None
        self._writer: RunWriter | None = None
        self._expected: list[Node] = []
        self._records: list[Record] = []
        self._begun: set[str] = set()
        self._raised: dict[str, str] = {}  # what a test without a verdict raised
        self._left_out: dict[str, str] = {}
        self._unused: tuple[UnusedExpectation, ...] = ()
        self._started_s = time.monotonic()

    def resume(self, stopped: ComparedRun) -> None:
        """Begin with the records of an interrupted run; raises UsageError if its options differ from this one's."""
        started = self._header(num_cases=0)
        this = ComparedRun(folder="this run", run=Run(header=started, records=(), footer=None))
        refuse_unlike(stopped, this)
        refuse_other_cases(stopped, this)
        self._resumed = stopped

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without xdist: the session's own items."""
        self._open([item.nodeid for item in session.items])

    # Any: xdist's node, whose package may not be installed.
    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """With xdist: every worker collects the same cases; the first report opens the run."""
        self._open(ids)

    # Any: as above.
    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """With xdist: a worker sends what it collected when it ends; if it died, another worker's report is used."""
        sent = getattr(node, "workeroutput", {}).get(FROM_WORKER)
        if sent is not None:
            self._config.stash[CATALOGUE] = pickle.loads(sent)
            self._config.stash[UNAVAILABLE] = node.workeroutput[UNAVAILABLE_FROM_WORKER]
            is_part, num_selected = node.workeroutput[PART_FROM_WORKER]
            self._config.stash[IS_PART], self._config.stash[NUM_SELECTED] = is_part, num_selected
            self._config.stash[KILLS] = node.workeroutput.get(KILLS_FROM_WORKER, {})
            self._open([])  # a shard without a case is a run too
            self._config.stash[LEFT_OUT] = node.workeroutput[LEFT_OUT_FROM_WORKER]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note which cases began: the others may not have, where the time of the run was limited."""
        self._begun.add(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the record that a test's report carries."""
        if report.failed and not any(name == RECORD_PROPERTY for name, _ in report.user_properties):
            crash = getattr(report.longrepr, "reprcrash", None)
            self._raised[report.nodeid] = " ".join(str(crash.message if crash else report.longrepr).split())
        if report.when != "call":
            return
        for name, value in report.user_properties:
            if name == RECORD_PROPERTY:
                self._append(from_json(Record, str(value), where=report.nodeid))
            elif name == LEFT_OUT_PROPERTY:
                self._left_out[report.nodeid] = str(value)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Record the selected cases that were never reached, fail for stale expectations, and write the footer."""
        beyond = self._beyond()
        for record in self._not_run(beyond):
            self._append(record)
        self._unused = unused(self._expectations, self._ran())
        is_red = any(found.is_stale for found in self._unused) or bool(self._unproven())
        is_misused = bool(self._unavailable) and bool(self._config.getoption("shardproof_engine"))
        # The records are those of an interrupted run too, if this one resumes it.
        has_run = bool(self._records) or self._writer is not None
        is_idle = bool(unjudged(self._records)) if has_run else None
        session.exitstatus = exit_code(
            session.exitstatus, is_red=is_red, is_misused=is_misused, is_idle=is_idle
        )
        if self._writer is not None:
            verdicts = [record.verdict for record in self._records]
            end = footer(verdicts=verdicts, duration_s=time.monotonic() - self._started_s)
            with self._stopping():
                self._writer.finish(
                    replace(
                        end,
                        unused=self._unused,
                        unavailable=self._unavailable,
                        is_whole=self._ran().catalogue.is_whole,
                        num_selected=self._config.stash.get(NUM_SELECTED, 0),
                        left_out=tuple(self._all_left_out()),
                        num_beyond=len(beyond),
                        powers=powers(self._config, self._records),
                    )
                )

    @property
    def _unavailable(self) -> dict[str, str]:
        return self._config.stash.get(UNAVAILABLE, {})

    # Any: pytest does not export the terminal reporter's type.
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Write the verdicts in one line, and the folder of the run."""
        if self._records and (untested := remark(version("torch"))):
            terminalreporter.write_line(untested, yellow=True)
        for engine, problem in self._unavailable.items():
            terminalreporter.write_line(f"not judged: {engine}: {problem}", red=True)
        # `shardproof run` makes pytest silent, and prints its own report.
        if not self._records or self._config.option.verbose < -1:
            return
        counts = ", ".join(f"{n} {v}" for v in Verdict if (n := sum(r.verdict is v for r in self._records)))
        kept = f"; kept in {self._out}" if self._out else ""
        terminalreporter.write_line(f"verdicts: {counts}{kept}")
        for sentence in unjudged(self._records):
            terminalreporter.write_line(f"NOTHING JUDGED: {sentence}", red=True)
        for cell in self._unproven():
            terminalreporter.write_line(str(cell), red=True)
        for found in self._unused:
            if found.is_stale:
                terminalreporter.write_line(f"STALE: {found}", red=True)
        idle = [found for found in self._unused if not found.is_stale]
        if len(idle) > MOST_LISTED:
            terminalreporter.write_line(f"not exercised: {len(idle)} expectations, of other cases or worlds")
        else:
            for found in idle:
                terminalreporter.write_line(f"not exercised: {found}")

    def _unproven(self) -> tuple[Unproven, ...]:
        return unproven(self._options, self._records)

    def _append(self, record: Record) -> None:
        with uninterrupted():
            self._records.append(record)
            if self._writer is not None:
                with self._stopping():
                    self._writer.append(record)

    @contextlib.contextmanager
    def _stopping(self) -> Iterator[None]:
        """End the session if the run cannot be written; the records so far remain, without a footer."""
        try:
            yield
        except UsageError as error:
            self._writer = None
            self._out = None
            end_session(str(error), pytest.ExitCode.USAGE_ERROR)

    def _open(self, nodeids: Sequence[str]) -> None:
        nodes = [node for nodeid in nodeids if (node := Node.parse(nodeid)) is not None]
        is_dry = self._config.option.collectonly
        is_part = self._config.stash.get(IS_PART, False)
        if self._writer is not None or not (nodes or is_part) or self._out is None or is_dry:
            return
        self._expected = nodes
        resumed = self._resumed
        num_resumed = len(resumed.run.records) if resumed is not None else 0
        with self._stopping():
            self._writer = RunWriter(self._out, self._header(num_cases=len(nodes) + num_resumed))
            if resumed is not None:
                for record in resumed.run.records:
                    self._append(carried(record, Path(resumed.folder), self._out, "resumed"))

    def _header(self, *, num_cases: int) -> Header:
        start = header(
            command=_as_typed(),
            engines=tuple(dict.fromkeys(c.engine for c in self._cells)),
            worlds=self._worlds(),
            seed=self._effort.seed,
            num_cases=num_cases,
        )
        found = cluster()
        return replace(
            start,
            hardware=start.hardware | ({"hosts": found.hosts} if found is not None else {}),
            num_schedules=self._effort.num_schedules,
            is_thorough=self._effort.is_thorough,
            hash_seeds=hash_seeds(self._effort.seed),
            expectations=self._expectations,
            options=self._options,
            model=self._model(),
        )

    def _model(self) -> dict[str, str]:
        """Describe the user's model, if there is one."""
        if "model" not in self._options:
            return {}
        # Here, because it needs torch, and only a check has a model.
        from shardproof.harness.runner.user_model.read import described

        return described(self._options["model"])

    def _worlds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(str(cell.world) for cell in self._cells))

    def _ran(self) -> Ran:
        catalogue = self._config.stash.get(CATALOGUE, Catalogue())
        return Ran(catalogue=catalogue, worlds=self._worlds(), records=self._records)

    def _all_left_out(self) -> Iterator[LeftOut]:
        in_no_world: dict[str, str] = self._config.stash.get(LEFT_OUT, {})
        for nodeid, why in {**in_no_world, **self._left_out}.items():
            if (node := Node.parse(nodeid)) is not None:
                yield LeftOut(
                    engine=node.engine,
                    case=node.case,
                    world=node.world,
                    suite=node.suite,
                    why=why,
                    was_selected=nodeid in self._left_out,
                )

    def _beyond(self) -> frozenset[str]:
        """Return the cases that were not begun because the time was over."""
        if time.monotonic() < self._config.stash.get(ENDS_AT, math.inf):
            return frozenset()
        return frozenset(node.nodeid for node in self._expected if node.nodeid not in self._begun)

    def _not_run(self, beyond: frozenset[str]) -> Iterator[Record]:
        found = cluster()
        why = found.lost if found is not None else ""
        model = self._options.get("model", "").removeprefix(f"{Path.cwd()}{os.sep}")
        seen = {(r.engine, r.case, r.world) for r in self._records}
        for node in self._expected:
            if node.key not in seen and node.nodeid not in self._left_out and node.nodeid not in beyond:
                yield Record(
                    engine=node.engine,
                    case=node.case,
                    world=node.world,
                    verdict=Verdict.NOT_RUN,
                    headline=why or self._why_not_run(node.nodeid),
                    suite=node.suite,
                    engine_version="",
                    command=check_command(model, node) if model else node.command,
                )

    def _why_not_run(self, nodeid: str) -> str:
        raised = self._raised.get(nodeid)
        return f"the test gave no verdict: {raised}" if raised else "selected, but the run ended before it"


def _as_typed() -> str:
    """Format the command line of this process, under the name by which it was called."""
    program = Path(sys.argv[0])
    # With ``python -m`` it is the path of the file: a package's own, or our command line.
    called = {"__main__.py": program.parent.name, "main.py": "shardproof"}.get(program.name, program.name)
    return shlex.join([called, *sys.argv[1:]])
