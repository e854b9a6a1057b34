"""pytest glue for processes that run cases: engine-by-world parameters, the selection of cases, the `trial` fixture."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardproof.harness.cases.case_id import Node, collected
from shardproof.harness.errors import HarnessBug, UsageError
from shardproof.harness.records.run import OBSERVATIONS, read_run
from shardproof.harness.runner.cell import Cell
from shardproof.harness.runner.engines import unavailable
from shardproof.harness.runner.launchers import is_launched, refuse_launcher
from shardproof.harness.runner.options import Keep
from shardproof.harness.runner.plugin import CELLS, CELLS_ARE_CHOSEN, EFFORT, will_run
from shardproof.harness.runner.record_writer import (
    CATALOGUE,
    FROM_WORKER,
    LEFT_OUT,
    LEFT_OUT_FROM_WORKER,
    UNAVAILABLE,
    UNAVAILABLE_FROM_WORKER,
)
from shardproof.harness.runner.selection import NUM_ELSEWHERE
from shardproof.harness.runner.session import Source, TrialSession
from shardproof.harness.runner.session_end import end_session, refuse
from shardproof.harness.runner.trial import Trial
from shardproof.harness.torch_compat.accelerators import require_device
from shardproof.harness.verdicts.known_failures import matches
from shardproof.harness.worlds.processes.forkserver import warm_up
from shardproof.harness.worlds.spec import ANY, Sizes, WorldKind

__all__ = ["Trial"]

_KEPT = pytest.StashKey[int]()  # how many tests this plugin would run if no plugin had deselected some
# The world must report its own verdict, with stacks, before pytest-timeout ends the test from outside.
_BEFORE_TIMEOUT_S = 3.0


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the process for cases."""
    # Comparing small tensors gains nothing from more threads, and threads of several workers would spin for cores.
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # so that the cell comes first in ids, where Node finds it
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize every test that takes a trial over engines and worlds."""
    if "trial" not in metafunc.fixturenames or CELLS_ARE_CHOSEN in metafunc.config.stash:
        return
    cells = metafunc.config.stash[CELLS]
    metafunc.parametrize("cell", cells, ids=[str(c) for c in cells], scope="session")


@pytest.hookimpl(tryfirst=True)  # so that it sees what -k and others will deselect
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect cases in worlds that do not suit them, such as two replicas of three ranks.

    In a replay, deselect also the cases that the replayed run did not contain.
    """
    if will_run(config) and any("trial" in getattr(item, "fixturenames", ()) for item in items):
        try:
            if not is_launched(config.getoption("shardproof_world")):
                refuse_launcher(os.environ)
            if CELLS_ARE_CHOSEN not in config.stash:
                for world in dict.fromkeys(cell.world for cell in config.stash[CELLS]):
                    require_device(world.device, world.num_local_processes)
        except UsageError as error:
            refuse(config, items, error)
    catalogue = collected([item.nodeid for item in items], config.args)
    _leave_out_unavailable(config, items)
    replay = config.getoption("shardproof_replay")
    known = {(r.engine, r.case, r.world) for r in read_run(Path(replay)).records} if replay else None
    if config.getoption("shardproof_model"):
        config.stash[LEFT_OUT] = {item.nodeid: why for item in items if (why := _why_senseless(item))}
    sensible = [item for item in items if not _why_senseless(item)]
    kept = [item for item in sensible if _is_known(item, known)]
    if len(kept) < len(items):
        remaining = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in remaining])
        items[:] = kept
    config.stash[_KEPT] = len(kept)
    config.stash[CATALOGUE] = catalogue if len(kept) == len(sensible) else catalogue.narrowed()


def _leave_out_unavailable(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases of engines that cannot be judged; the record writer reports them with the cause."""
    if CELLS_ARE_CHOSEN in config.stash or not will_run(config):
        return
    cells = {id(item): cell for item in items if (cell := _cell(item)) is not None}
    names = dict.fromkeys(cell.engine for cell in cells.values())
    problems = unavailable(names, limit_s=config.getoption("shardproof_deadline"))
    config.stash[UNAVAILABLE] = problems
    hopeless = {key for key, cell in cells.items() if cell.engine in problems}
    if hopeless:
        config.hook.pytest_deselected(items=[item for item in items if id(item) in hopeless])
        items[:] = [item for item in items if id(item) not in hopeless]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Wait for the fork server before the first case, so that its timeout excludes the server's imports."""
    config = session.config
    if _KEPT not in config.stash or NUM_ELSEWHERE not in config.stash:
        return  # nothing was collected, or a mark is wrong: pytest reports that itself
    if len(session.items) + config.stash[NUM_ELSEWHERE] < config.stash[_KEPT]:
        config.stash[CATALOGUE] = config.stash[CATALOGUE].narrowed()
    if hasattr(config, "workeroutput"):
        config.workeroutput[FROM_WORKER] = pickle.dumps(config.stash[CATALOGUE])
        config.workeroutput[UNAVAILABLE_FROM_WORKER] = config.stash.get(UNAVAILABLE, {})
        config.workeroutput[LEFT_OUT_FROM_WORKER] = config.stash.get(LEFT_OUT, {})
    if will_run(config) and any("trial" in getattr(item, "fixturenames", ()) for item in session.items):
        try:
            num_ranks = max(map(_num_servers, session.items), default=1)
            warm_up(config.getoption("shardproof_deadline"), num_ranks=num_ranks)
        except HarnessBug as error:
            end_session(str(error), pytest.ExitCode.INTERNAL_ERROR)


@pytest.fixture
def trial(request: pytest.FixtureRequest, trial_session: TrialSession, cell: Cell) -> Trial:
    """One engine in one world."""
    limit = _timeout_s(request)
    if limit is not None:
        world = replace(
            cell.world, deadline_s=max(1.0, min(cell.world.deadline_s, limit - _BEFORE_TIMEOUT_S))
        )
        cell = replace(cell, world=world)
    return Trial(trial_session, cell, request.node, lacks=_lacking_device(request.node, cell))


@pytest.fixture(scope="session")
def trial_session(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TrialSession]:
    """The session that judges this process's cases."""
    config = request.config
    replay, out = config.getoption("shardproof_replay"), config.getoption("shardproof_out")
    folder = Path(replay or out) if replay or out else tmp_path_factory.mktemp("run")
    worker = getattr(config, "workerinput", {}).get("workerid", "main")
    session = TrialSession(
        Source(
            folder=folder.resolve() / OBSERVATIONS,
            worker=worker,
            is_replay=replay is not None,
            keep=Keep(config.getoption("shardproof_keep")),
            oracles=Path(oracles).resolve() if (oracles := config.getoption("shardproof_oracles")) else None,
        ),
        config.stash[EFFORT],
    )
    yield session
    session.close()


def _why_senseless(item: pytest.Item) -> str:
    cell = _cell(item)
    if cell is None or cell.is_placeholder:
        return ""
    sizes: list[Sizes] = [marker.args[0] for marker in item.iter_markers("worlds")] or [ANY]
    needs = [s.name for s in sizes if not s.suits(cell.world)]
    # On an accelerator the record lists what the run lacks; on a CPU, where most runs are, it lacks nothing.
    if cell.world.device == "cpu" and (device := _lacking_device(item, cell)):
        needs.append(device)
    return f"needs {needs[0]}" if needs else ""


def _lacking_device(item: pytest.Item, cell: Cell) -> str:
    patterns = [marker.args[0] for marker in item.iter_markers("device")]
    lacking = next((p for p in patterns if not matches(p, cell.world.device)), "")
    if lacking.startswith("!"):
        return f"another device than {lacking[1:]}"
    return f"the device {lacking}" if lacking else ""


def _cell(item: pytest.Item) -> Cell | None:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("cell") if callspec is not None else None


def _num_servers(item: pytest.Item) -> int:
    """Return the number of fork servers an item needs: one for each rank that is a process, else one."""
    cell = _cell(item)
    return cell.world.size if cell is not None and cell.world.kind is WorldKind.PROCESSES else 1


def _is_known(item: pytest.Item, known: set[tuple[str, str, str]] | None) -> bool:
    node = Node.parse(item.nodeid)
    return known is None or node is None or node.key in known


def _timeout_s(request: pytest.FixtureRequest) -> float | None:
    marker = request.node.get_closest_marker("timeout")
    if marker is not None and marker.args:
        return float(marker.args[0])
    configured = request.config.getoption("timeout", None) or request.config.getini("timeout")
    return float(configured) if configured else None
