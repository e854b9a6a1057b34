"""pytest glue: options, engine-by-world parameters, the `trial` fixture, and the sink that writes records."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.registry import BUILT_IN, EngineNotFoundError
from harness import expectations_file
from harness.aside import describe
from harness.case import Case, Refusal, Training
from harness.catalogue import collected
from harness.collection import Refusals, refuse
from harness.effort import Effort
from harness.errors import HarnessBug, UsageError
from harness.expectations import expected
from harness.hunt import NOBODY, Grounds, Hunt
from harness.law import Law
from harness.node import Node
from harness.prey import Breadth
from harness.provenance import today
from harness.record import Expectations, Record, to_json
from harness.run_directory import OBSERVATIONS, read_run, refuse_existing
from harness.sink import CATALOGUE, FROM_WORKER, RECORD_PROPERTY, Sink
from harness.trial import Cell, Source, TrialSession
from harness.verdict import Verdict
from harness.worlds.forkserver import warm_up
from harness.worlds.sizes import Sizes
from harness.worlds.spec import WorldSpec
from suites.upstream import TABLES, TESTS

__all__ = ["Trial"]

_DEFAULT_WORLDS = ["threads:2"]
_CELLS = pytest.StashKey[Sequence[Cell]]()
_EFFORT = pytest.StashKey[Effort]()
_EXPECTATIONS = pytest.StashKey[Expectations | None]()
_KEPT = pytest.StashKey[int]()  # how many tests this plugin would run, had nothing else left some out
_TABLES = (TESTS, *TABLES.values())
_MARKS = (
    "worlds(sizes): the worlds that a case makes sense for",
    "device(name): the only device that can show what a case asks",
    "rows(id, ...): the upstream tests that a case stands for",
    "api(name, ...): the names of FullyShardedDataParallel's interface that a case stands for",
    "prey(mutant, ..., world=None): the mutants that a case must kill, in one world or in the first that suits it",
)
_TO_WORKER = "shardproof.expectations"
# The world must give its own verdict, with stacks, before pytest-timeout ends the test from outside.
_BEFORE_TIMEOUT_S = 3.0


class Trial:
    """What a suite's test is given: one engine in one world, and the means to hold it to laws."""

    def __init__(self, session: TrialSession, cell: Cell, item: pytest.Item) -> None:
        self._session = session
        self._cell = cell
        self._item = item
        self._expectations = item.config.stash[_EXPECTATIONS]

    @property
    def world_size(self) -> int:
        """How many ranks the world has."""
        return self._cell.world.size

    def holds(self, training: Training, *laws: Law, refusal: Refusal = Refusal.WRONG) -> None:
        """Judge this engine: every law must hold of the training, on every rank.

        ``refusal`` says what becomes of an engine that declares all that the plan needs and refuses it.
        Fails the test for every verdict that does not conform, skips it for UNSUPPORTED, and lets it fail as
        expected for KNOWN_FAILURE; in any case the verdict is recorded.
        """
        __tracebackhide__ = True
        node = Node.parse(self._item.nodeid)
        if node is None:
            raise HarnessBug(
                "the trial fixture",
                expected="a node id with ENGINE@WORLD",
                got=self._item.nodeid,
                hint="reporting this",
            )
        case = Case(id=node.case, training=training, laws=laws, refusal=refusal)
        judged = self._session.run(case, self._cell, suite=node.suite, command=node.command)
        record = expected(judged, self._expectations)
        self._item.user_properties.append((RECORD_PROPERTY, to_json(record)))
        if record.verdict is Verdict.UNSUPPORTED:
            pytest.skip(f"UNSUPPORTED: {record.headline}")
        if record.verdict is Verdict.KNOWN_FAILURE and record.expectation is not None:
            pytest.xfail(f"KNOWN_FAILURE: {record.expectation.reason} ({record.expectation.link})")
        if not record.verdict.is_conforming:
            pytest.fail(_explain(record), pytrace=False)


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
    group.addoption(
        "--expectations", metavar="FILE", help="known failures (default: suites/expectations.toml)"
    )
    group.addoption("--no-expectations", action="store_true", help="give raw verdicts")
    group.addoption(
        "--prey",
        choices=[str(breadth.value) for breadth in Breadth],
        help="engines are mutants: give each case those that its prey marks name, or one case each of these, or all",
    )
    group.addoption(
        "--schedule-seed", type=int, default=0, metavar="S", help="seed of the first schedule (default: 0)"
    )
    group.addoption(
        "--schedules",
        type=int,
        default=1,
        metavar="N",
        help="run each case under so many schedules, where ranks are threads (default: 1)",
    )
    group.addoption(
        "--thorough", action="store_true", help="watch every training for all that can be watched on a CPU"
    )
    group.addoption("--deadline", type=float, default=60.0, metavar="S", help="seconds a world may take")


def pytest_configure(config: pytest.Config) -> None:
    """Read the options, and register the sink in the process that sees all reports; workers send theirs there."""
    # Comparing small tensors gains nothing from more threads, and several workers with several each spin for cores.
    torch.set_num_threads(1)
    for mark in _MARKS:
        config.addinivalue_line("markers", mark)
    try:
        config.stash[_CELLS] = _cells(config)
        config.stash[_EFFORT] = _effort(config)
        config.stash[_EXPECTATIONS] = _expectations(config)
        if config.getoption("--out") and not hasattr(config, "workerinput"):
            refuse_existing(Path(config.getoption("--out")))
    except (UsageError, EngineNotFoundError) as error:
        raise pytest.UsageError(str(error)) from error
    if not hasattr(config, "workerinput"):
        out = config.getoption("--out")
        sink = Sink(
            config,
            config.stash[_CELLS],
            config.stash[_EXPECTATIONS],
            Path(out) if out else None,
            config.stash[_EFFORT],
        )
        config.pluginmanager.register(sink, "shardproof-sink")
        config.pluginmanager.register(Refusals(), "shardproof-refusals")
    if config.getoption("--prey"):
        grounds = Grounds.of(config.stash[_CELLS], config)
        config.pluginmanager.register(Hunt(grounds), "shardproof-hunt")


# Any: xdist's node, whose package need not be there.
@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give every worker the expectations, and the day, that this process read: one run, one answer."""
    node.workerinput[_TO_WORKER] = pickle.dumps(node.config.stash[_EXPECTATIONS])


@pytest.hookimpl(tryfirst=True)  # so that the cell comes first in ids, where Node finds it
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give every test that asks for a trial one instance per engine and world."""
    if "trial" not in metafunc.fixturenames or metafunc.config.getoption("--prey"):
        return  # the hunt chooses engines and worlds itself
    cells = metafunc.config.stash[_CELLS]
    metafunc.parametrize("cell", cells, ids=[str(c) for c in cells], scope="session")


@pytest.hookimpl(tryfirst=True)  # so that it sees what -k and others will leave out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect cases in worlds they make no sense for, such as two replicas of three ranks.

    When replaying, deselect also what the run to replay did not contain.
    """
    try:
        for table, item in product(_TABLES, items):
            table.rows_of(item.iter_markers(table.mark), where=item.nodeid)
    except UsageError as error:
        refuse(config, items, error)
    catalogue = collected([item.nodeid for item in items], config.args)
    replay = config.getoption("--replay")
    known = {(r.engine, r.case, r.world) for r in read_run(Path(replay)).records} if replay else None
    sensible = [item for item in items if _makes_sense(item)]
    kept = [item for item in sensible if _is_known(item, known)]
    if len(kept) < len(items):
        remaining = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in remaining])
        items[:] = kept
    config.stash[_KEPT] = len(kept)
    config.stash[CATALOGUE] = catalogue if len(kept) == len(sensible) else catalogue.narrowed()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the fork server before the first case, whose timeout must not pay for the server's imports."""
    config = session.config
    if _KEPT not in config.stash:
        return  # a path that does not exist: pytest collected nothing and says so itself
    if len(session.items) < config.stash[_KEPT]:
        config.stash[CATALOGUE] = config.stash[CATALOGUE].narrowed()
    if hasattr(config, "workeroutput"):
        config.workeroutput[FROM_WORKER] = pickle.dumps(config.stash[CATALOGUE])
    will_run = not (config.option.collectonly or config.getoption("--replay"))
    if will_run and any("trial" in getattr(item, "fixturenames", ()) for item in session.items):
        # What cases send to their worlds comes from these; each world would else import them anew.
        warm_up(
            tuple(name for name in sorted(sys.modules) if name.startswith(("fixtures.", "harness.scripts.")))
        )


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
        Source(folder=folder.resolve() / OBSERVATIONS, worker=worker, is_replay=replay is not None),
        config.stash[_EFFORT],
    )
    yield session
    session.close()


def _cells(config: pytest.Config) -> list[Cell]:
    """Read --engine and --world; raises for a name that resolves to nothing."""
    worlds = [
        WorldSpec.parse(text, deadline_s=config.getoption("--deadline"))
        for text in dict.fromkeys(config.getoption("--world") or _DEFAULT_WORLDS)
    ]
    is_worker = hasattr(config, "workerinput")  # whose controller has looked already
    for engine in [] if is_worker else config.getoption("--engine") or []:
        if engine not in BUILT_IN:
            describe(engine)
    engines = list(dict.fromkeys(config.getoption("--engine") or sorted(BUILT_IN)))
    return [Cell(engine=engine, world=world) for engine in engines for world in worlds]


def _effort(config: pytest.Config) -> Effort:
    """Read the options; a replay looks at what the run to replay made its effort for."""
    replay = config.getoption("--replay")
    if replay:
        made = read_run(Path(replay)).header
        return Effort(seed=made.seed, num_schedules=made.num_schedules, is_thorough=made.is_thorough)
    return Effort(
        seed=config.getoption("--schedule-seed"),
        num_schedules=config.getoption("--schedules"),
        is_thorough=config.getoption("--thorough"),
    )


def _expectations(config: pytest.Config) -> Expectations | None:
    """Read the file once per session; a replay expects what the run to replay did, on the day of that run."""
    given, is_raw = config.getoption("--expectations"), config.getoption("--no-expectations")
    replay = config.getoption("--replay")
    if hasattr(config, "workerinput"):
        # Our own bytes, from the process that started this one.
        sent: Expectations | None = pickle.loads(config.workerinput[_TO_WORKER])
        return sent
    if sum(map(bool, (given, is_raw, replay))) > 1:
        raise UsageError(
            "--expectations, --no-expectations and --replay",
            expected="at most one of them",
            got="several",
            hint="leaving the others out; a replay has its expectations from the run",
        )
    if replay:
        return read_run(Path(replay)).header.expectations
    file = None if is_raw else expectations_file.find(given)
    return expectations_file.read(file, today=today()) if file else None


def _makes_sense(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    cell = callspec.params.get("cell") if callspec is not None else None
    if cell is None or cell.engine == NOBODY:
        return True
    sizes: list[Sizes] = [marker.args[0] for marker in item.iter_markers("worlds")]
    devices = {marker.args[0] for marker in item.iter_markers("device")}
    return all(s.suits(cell.world) for s in sizes) and devices <= {cell.world.device}


def _is_known(item: pytest.Item, known: set[tuple[str, str, str]] | None) -> bool:
    node = Node.parse(item.nodeid)
    return known is None or node is None or node.key in known


def _timeout_s(request: pytest.FixtureRequest) -> float | None:
    marker = request.node.get_closest_marker("timeout")
    if marker is not None and marker.args:
        return float(marker.args[0])
    configured = request.config.getoption("timeout", None) or request.config.getini("timeout")
    return float(configured) if configured else None


def _explain(record: Record) -> str:
    lines = [f"{record.verdict}: {record.engine} in {record.world}: {record.case}", record.headline]
    for law in record.laws:
        if not law.held:
            lines += [f"  {law.law}: {law.summary}", *(f"    {d}" for d in law.details)]
    lines += [f"  rank {o.rank} {o.kind}" for o in record.outcomes]
    if record.expectation is not None:
        entry = record.expectation
        lines.append(f"  expectation {entry.number}: {entry.reason} ({entry.link}), until {entry.expiry}")
    return "\n".join([*lines, f"repeat: {record.command}"])
