"""pytest glue: options, engine-by-world parameters, the `trial` fixture, and the sink that writes records."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.registry import BUILT_IN, EngineNotFoundError, resolve
from harness.case import Case, Training
from harness.errors import UsageError
from harness.law import Law
from harness.provenance import footer, header
from harness.record import Record, from_json, to_json
from harness.run_directory import OBSERVATIONS, RunWriter, read_run, refuse_existing
from harness.trial import Cell, Source, TrialSession
from harness.verdict import Verdict
from harness.worlds.forkserver import warm_up
from harness.worlds.sizes import Sizes
from harness.worlds.spec import WorldSpec

__all__ = ["Trial"]

_PROPERTY = "shardproof.record"
_DEFAULT_WORLDS = ["threads:2"]
_CELLS = pytest.StashKey[list[Cell]]()
# The world must give its own verdict, with stacks, before pytest-timeout ends the test from outside.
_BEFORE_TIMEOUT_S = 3.0
_CELL_IN_ID = re.compile(r"\[(?P<engine>.+)@(?P<world>[a-z]+:\d+(?::[a-z]+)?)(?:-(?P<rest>.*))?\]$")


class Trial:
    """What a suite's test is given: one engine in one world, and the means to hold it to laws."""

    def __init__(self, session: TrialSession, cell: Cell, item: pytest.Item) -> None:
        self._session = session
        self._cell = cell
        self._item = item

    @property
    def world_size(self) -> int:
        """How many ranks the world has."""
        return self._cell.world.size

    def holds(self, training: Training, *laws: Law) -> None:
        """Judge this engine: every law must hold of the training, on every rank.

        Fails the test for every verdict that does not conform and skips it for UNSUPPORTED; either way the
        verdict is recorded.
        """
        __tracebackhide__ = True
        nodeid = self._item.nodeid
        case = Case(id=case_id(nodeid), training=training, laws=laws)
        record = self._session.run(
            case, self._cell, suite=suite_of(nodeid), command=_command(nodeid, self._cell)
        )
        self._item.user_properties.append((_PROPERTY, to_json(record)))
        if record.verdict is Verdict.UNSUPPORTED:
            pytest.skip(f"UNSUPPORTED: {record.headline}")
        if not record.verdict.is_conforming:
            pytest.fail(_explain(record), pytrace=False)


def case_id(nodeid: str) -> str:
    """Give the case's id, which names neither engine nor world: ``parity/test_x.py::test_y[rest]``."""
    match = _CELL_IN_ID.search(nodeid)
    stem = nodeid.removeprefix("suites/")
    if match is None:
        return stem
    rest = f"[{match['rest']}]" if match["rest"] else ""
    return _CELL_IN_ID.sub("", stem) + rest


def suite_of(nodeid: str) -> str:
    """Name the suite folder a case lives in."""
    parts = nodeid.removeprefix("suites/").split("/")
    return parts[0] if len(parts) > 1 else ""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that suites understand; without --out nothing is kept after the session."""
    group = parser.getgroup("shardproof")
    group.addoption(
        "--engine",
        action="append",
        metavar="NAME",
        help="engine to judge; may repeat (default: all built in)",
    )
    group.addoption(
        "--world",
        action="append",
        metavar="KIND:SIZE",
        help="world to judge in; may repeat (default: threads:2)",
    )
    group.addoption("--out", metavar="DIR", help="keep records and observations in this folder")
    group.addoption("--replay", metavar="DIR", help="judge what this run observed; start no world")
    group.addoption("--deadline", type=float, default=60.0, metavar="S", help="seconds a world may take")


def pytest_configure(config: pytest.Config) -> None:
    """Read the options, and register the sink in the process that sees all reports; workers send theirs there."""
    config.addinivalue_line("markers", "worlds(sizes): the world sizes that a case makes sense for")
    try:
        config.stash[_CELLS] = _cells(config)
        if config.getoption("--out") and not hasattr(config, "workerinput"):
            refuse_existing(Path(config.getoption("--out")))
    except (UsageError, EngineNotFoundError) as error:
        raise pytest.UsageError(str(error)) from error
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Sink(config), "shardproof-sink")


@pytest.hookimpl(tryfirst=True)  # so that the cell comes first in ids, where case_id finds it
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every test that asks for a trial one instance per engine and world."""
    if "trial" not in metafunc.fixturenames:
        return
    cells = metafunc.config.stash[_CELLS]
    metafunc.parametrize("cell", cells, ids=[str(c) for c in cells], scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect cases in worlds they make no sense for, such as two replicas of three ranks.

    When replaying, deselect also what the run to replay did not contain.
    """
    replay = config.getoption("--replay")
    known = {(r.engine, r.case, r.world) for r in read_run(Path(replay)).records} if replay else None
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        (kept if _makes_sense(item) and _is_known(item, known) else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the fork server before the first case, whose timeout must not pay for the server's imports."""
    config = session.config
    will_run = not (config.option.collectonly or config.getoption("--replay"))
    if will_run and any("trial" in getattr(item, "fixturenames", ()) for item in session.items):
        warm_up()


@pytest.fixture
def trial(request: pytest.FixtureRequest, trial_session: TrialSession, cell: Cell) -> Trial:
    """One engine in one world."""
    limit = _timeout_s(request)
    if limit is not None:
        world = replace(
            cell.world, deadline_s=max(1.0, min(cell.world.deadline_s, limit - _BEFORE_TIMEOUT_S))
        )
        cell = replace(cell, world=world)
    return Trial(trial_session, cell, request.node)


@pytest.fixture(scope="session")
def trial_session(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TrialSession]:
    """What this session has run so far."""
    config = request.config
    replay, out = config.getoption("--replay"), config.getoption("--out")
    folder = Path(replay or out) if replay or out else tmp_path_factory.mktemp("run")
    worker = getattr(config, "workerinput", {}).get("workerid", "main")
    session = TrialSession(
        Source(folder=folder.resolve() / OBSERVATIONS, worker=worker, is_replay=replay is not None)
    )
    yield session
    session.close()


class _Sink:
    """Writes each record as its report arrives; one process, so that lines never interleave."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._writer: RunWriter | None = None
        self._expected: list[str] = []
        self._records: list[Record] = []
        self._started_s = time.monotonic()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without xdist: the session's own items."""
        self._open([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """With xdist: every worker collects the same; the first to say so opens the run."""
        self._open(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the record that a test's report carries."""
        if report.when != "call":
            return
        for name, value in report.user_properties:
            if name == _PROPERTY:
                record = from_json(Record, str(value), where=report.nodeid)
                self._records.append(record)
                if self._writer is not None:
                    self._writer.append(record)

    def pytest_sessionfinish(self) -> None:
        """Record what was selected and never reached, and write the footer."""
        if self._writer is None:
            return
        for record in self._not_run():
            self._records.append(record)
            self._writer.append(record)
        verdicts = [record.verdict for record in self._records]
        self._writer.finish(footer(verdicts=verdicts, duration_s=time.monotonic() - self._started_s))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say the verdicts in one line, and where the run is kept."""
        if not self._records:
            return
        counts = ", ".join(f"{n} {v}" for v in Verdict if (n := sum(r.verdict is v for r in self._records)))
        out = self._config.getoption("--out")
        terminalreporter.write_line(f"verdicts: {counts}" + (f"; kept in {out}" if out else ""))

    def _open(self, nodeids: list[str]) -> None:
        cases = [n for n in nodeids if _CELL_IN_ID.search(n)]
        out = self._config.getoption("--out")
        if self._writer is not None or not cases or not out or self._config.option.collectonly:
            return
        self._expected = cases
        cells = self._config.stash[_CELLS]
        self._writer = RunWriter(
            Path(out),
            header(
                command=_as_typed(),
                engines=tuple(dict.fromkeys(c.engine for c in cells)),
                worlds=tuple(dict.fromkeys(str(c.world) for c in cells)),
                seed=0,
                num_cases=len(cases),
            ),
        )

    def _not_run(self) -> Iterator[Record]:
        seen = {(r.engine, r.case, r.world) for r in self._records}
        for nodeid in self._expected:
            match = _CELL_IN_ID.search(nodeid)
            if match is None or (match["engine"], case_id(nodeid), match["world"]) in seen:
                continue
            cell = Cell(engine=match["engine"], world=WorldSpec.parse(match["world"]))
            yield Record(
                engine=cell.engine,
                case=case_id(nodeid),
                world=str(cell.world),
                verdict=Verdict.NOT_RUN,
                headline="selected, but the run ended or the test broke before it gave a verdict",
                suite=suite_of(nodeid),
                engine_version="",
                command=_command(nodeid, cell),
            )


def _cells(config: pytest.Config) -> list[Cell]:
    """Read --engine and --world; raises for a name that resolves to nothing."""
    worlds = [
        WorldSpec.parse(text, deadline_s=config.getoption("--deadline"))
        for text in dict.fromkeys(config.getoption("--world") or _DEFAULT_WORLDS)
    ]
    for engine in config.getoption("--engine") or []:  # the built-in ones load when a case asks for them
        resolve(engine)
    engines = list(dict.fromkeys(config.getoption("--engine") or sorted(BUILT_IN)))
    return [Cell(engine=engine, world=world) for engine in engines for world in worlds]


def _makes_sense(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    cell = callspec.params.get("cell") if callspec is not None else None
    if cell is None:
        return True
    sizes: list[Sizes] = [marker.args[0] for marker in item.iter_markers("worlds")]
    return all(s.allows(cell.world.size) for s in sizes)


def _is_known(item: pytest.Item, known: set[tuple[str, str, str]] | None) -> bool:
    match = _CELL_IN_ID.search(item.nodeid)
    return known is None or match is None or (match["engine"], case_id(item.nodeid), match["world"]) in known


def _timeout_s(request: pytest.FixtureRequest) -> float | None:
    marker = request.node.get_closest_marker("timeout")
    if marker is not None and marker.args:
        return float(marker.args[0])
    configured = request.config.getoption("timeout", None) or request.config.getini("timeout")
    return float(configured) if configured else None


def _as_typed() -> str:
    """Spell the command line of this process, under the name by which it is called."""
    program = Path(sys.argv[0]).name
    return shlex.join(
        [{"cli.py": "shardproof", "__main__.py": "pytest"}.get(program, program), *sys.argv[1:]]
    )


def _command(nodeid: str, cell: Cell) -> str:
    return shlex.join(["pytest", nodeid, "--engine", cell.engine, "--world", str(cell.world)])


def _explain(record: Record) -> str:
    lines = [f"{record.verdict}: {record.engine} in {record.world}: {record.case}", record.headline]
    for law in record.laws:
        if not law.held:
            lines += [f"  {law.law}: {law.summary}", *(f"    {d}" for d in law.details)]
    lines += [f"  rank {o.rank} {o.kind}" for o in record.outcomes]
    return "\n".join([*lines, f"repeat: {record.command}"])
