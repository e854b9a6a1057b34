"""pytest glue: the options, the record writer, and, in processes that run cases, the plugin that runs them.

A process that only distributes cases to workers does not need torch, and does not wait for it.
"""

from __future__ import annotations

import gc
import os
import pickle
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardproof.engine.registry import BUILT_IN, EngineNotFoundError, check_spelling
from shardproof.harness.cases.case_id import SUITES
from shardproof.harness.errors import UsageError
from shardproof.harness.records.provenance import today
from shardproof.harness.records.record import Expectations
from shardproof.harness.records.run import read_run, refuse_existing
from shardproof.harness.runner import selection, time_limit
from shardproof.harness.runner.accelerator_worlds import concrete
from shardproof.harness.runner.cell import Cell
from shardproof.harness.runner.launchers import is_launched, join_launcher
from shardproof.harness.runner.options import DEFAULT_WORLD, RunOptions, add_to_pytest
from shardproof.harness.runner.record_writer import RecordWriter
from shardproof.harness.runner.session_end import Refusals, refuse
from shardproof.harness.verdicts import known_failures_file
from shardproof.harness.worlds.processes.forkserver import draw_hash_seeds, forkserver_context
from shardproof.harness.worlds.processes.lineage import die_with_parent
from shardproof.harness.worlds.spec import WorldSpec

CELLS = pytest.StashKey[Sequence[Cell]]()
CELLS_ARE_CHOSEN = pytest.StashKey[bool]()  # by another plugin, for each case separately
EFFORT = pytest.StashKey[RunOptions]()
EXPECTATIONS = pytest.StashKey[Expectations | None]()

_MARKS = (
    "worlds(sizes): the sizes of worlds that suit a case",
    "device(name): the only device that a case can run on, or !name for all but one",
    "rows(id, ...): the upstream tests that a case covers",
    "api(name, ...): the names of FullyShardedDataParallel's interface that a case covers",
    "kills(mutant, ..., world=None, deadline_s=None): the mutants that a case must kill, in one world or in the first "
    "that suits it; if they hang, within so many seconds",
)
_TO_WORKER = "shardproof.expectations"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of suites, each by two names; without --out nothing is kept after the session."""
    group = parser.getgroup("shardproof")
    short: set[str] = set()

    def add(name: str, **settings: Any) -> None:
        own = f"--shardproof{name[1:]}"
        try:
            group.addoption(own, name, **settings)
            short.add(name)
        except ArgumentError:  # a conftest.py that loads this plugin has an option of that name
            group.addoption(own, **settings)

    add_to_pytest(add)
    _release_names(short, parser)


def _release_names(short: set[str], parser: pytest.Parser) -> None:
    """Release the short name of an option if a conftest.py that is read later adds one of that name."""
    find, actions = parser.getgroup, parser.optparser._option_string_actions

    # Any: what options of pytest are made of.
    def add(group: pytest.OptionGroup, *names: str, **settings: Any) -> None:
        for name in short.intersection(names):
            option = actions.pop(name)
            option.option_strings = [each for each in option.option_strings if each != name]
            short.remove(name)
        pytest.OptionGroup.addoption(group, *names, **settings)

    def beside(name: str, description: str = "", after: str | None = None) -> pytest.OptionGroup:
        group = find(name, description, after)
        group.addoption = partial(add, group)  # type: ignore[method-assign]  # of this parser
        return group

    parser.getgroup = beside  # type: ignore[method-assign]  # of this parser
    beside("_anonymous")  # the group to which the parser itself adds


def pytest_configure(config: pytest.Config) -> None:
    """Read the options; register the record writer in the process that receives the reports of all workers."""
    if hasattr(config, "workerinput"):
        die_with_parent()  # a worker that waits for a case would survive a session that is killed
    for mark in _MARKS:
        config.addinivalue_line("markers", mark)
    try:
        _join_launcher(config)
        config.stash[CELLS] = _cells(config)
        config.stash[EFFORT] = _effort(config)
        config.stash[EXPECTATIONS] = _expectations(config)
        time_limit.begin(config)
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(_sink(config), "shardproof-sink")
            config.pluginmanager.register(Refusals(), "shardproof-refusals")
    except (UsageError, EngineNotFoundError) as error:
        raise pytest.UsageError(str(error)) from error
    # Under xdist the workers run the cases, each with "no" of its own.
    if config.getoption("dist", "no") == "no":
        draw_hash_seeds(config.stash[EFFORT].seed)
        if _will_run_suites(config):
            forkserver_context()  # it imports while this process does its own imports
        gc.disable()  # until all is imported: none of it is garbage, and a collection takes a tenth of the time
        config.pluginmanager.import_plugin("shardproof.harness.runner.fixture")
        config.pluginmanager.register(selection, "shardproof-selection")


def _join_launcher(config: pytest.Config) -> None:
    """Connect to a launcher's ranks, or refuse it; a process that only serves its rank ends here."""
    worlds = config.getoption("shardproof_world")
    if not will_run(config) or not (is_launched(worlds) or _will_run_suites(config)):
        return
    if is_launched(worlds) and config.getoption("dist", "no") != "no":
        raise UsageError(
            "--world launched",
            expected="one case at a time",
            got="-n",
            hint="leaving -n out; more ranks make more of a cluster",
        )
    code = join_launcher(os.environ, worlds, seed=config.getoption("shardproof_schedule_seed"))
    if code is not None:
        pytest.exit("the rank is no longer needed", returncode=code)


def _sink(config: pytest.Config) -> RecordWriter:
    """Create the record writer; raises UsageError if the run cannot be kept as requested."""
    out, resumed = config.getoption("shardproof_out"), config.getoption("shardproof_resume")
    if out:
        refuse_existing(Path(out))
    elif resumed:
        raise UsageError("--resume", expected="--out too", got="none", hint="--out with a new folder")
    sink = RecordWriter(
        config,
        config.stash[CELLS],
        config.stash[EXPECTATIONS],
        Path(out) if out else None,
        config.stash[EFFORT],
        selection.selected(config),
    )
    if resumed:
        sink.resume(selection.interrupted(Path(resumed)))
    return sink


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Leave no case if the selection is refused, as a -k that cannot be parsed is."""
    try:
        yield
    except pytest.UsageError as error:
        refuse(config, items, error)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze all imported and collected objects, so that the garbage collector skips them."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Enable the garbage collector if nothing was collected."""
    gc.enable()


# Any: xdist's node, whose package may not be installed.
@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Send every worker what this process read: expectations and day, so that all judge alike, and the time limit."""
    node.workerinput[_TO_WORKER] = pickle.dumps(node.config.stash[EXPECTATIONS])
    node.workerinput |= time_limit.told(node.config)


def will_run(config: pytest.Config) -> bool:
    """Return whether cases will run that the session selects, in worlds of their own."""
    return not (config.option.collectonly or config.getoption("shardproof_replay"))


def _will_run_suites(config: pytest.Config) -> bool:
    folders = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    return will_run(config) and any(folder.is_relative_to(SUITES) for folder in folders)


def _cells(config: pytest.Config) -> list[Cell]:
    """Read --engine and --world; raises for a misspelt name."""
    worlds = [
        WorldSpec.parse(concrete(text), deadline_s=config.getoption("shardproof_deadline"))
        for text in dict.fromkeys(config.getoption("shardproof_world") or [DEFAULT_WORLD])
    ]
    engines = list(dict.fromkeys(config.getoption("shardproof_engine") or sorted(BUILT_IN)))
    for engine in engines:
        if not config.getoption("shardproof_replay"):  # no engine is loaded, so any name will do
            check_spelling(engine)
    return [Cell(engine=engine, world=world) for engine in engines for world in worlds]


def _effort(config: pytest.Config) -> RunOptions:
    """Read the options; a replay uses the effort of the replayed run."""
    replay = config.getoption("shardproof_replay")
    if replay:
        made = read_run(Path(replay)).header
        return RunOptions(seed=made.seed, num_schedules=made.num_schedules, is_thorough=made.is_thorough)
    return RunOptions(
        seed=config.getoption("shardproof_schedule_seed"),
        num_schedules=config.getoption("shardproof_schedules"),
        is_thorough=config.getoption("shardproof_thorough"),
        locates=not config.getoption("shardproof_no_locate"),
    )


def _expectations(config: pytest.Config) -> Expectations | None:
    """Read the file once per session; a replay uses the expectations and the day of the replayed run."""
    given, is_raw = (
        config.getoption("shardproof_expectations"),
        config.getoption("shardproof_no_expectations"),
    )
    replay = config.getoption("shardproof_replay")
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
    file = None if is_raw else known_failures_file.find(given)
    return known_failures_file.read(file, today=today()) if file else None
