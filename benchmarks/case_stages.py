"""Times the stages of cases, in the session that judges and in every process that it forks; see `case_cost`.

A pytest plugin, which is also the last that fork servers import. Each stage is written when it ends: its CPU seconds on
the thread that ran it, less those of stages inside it.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from shardproof.harness.worlds.processes import forkserver

FILE = "CASE_STAGES_FILE"  # the environment variable with the output path
IMPORTS = "imports"
SESSION = "the session in all"

# The functions of each stage. A stage of the session is called only there, others in forks.
STAGES_OF_SESSION = {
    "identity": ["runner.training_request:Identities.digest"],
    "worlds": ["worlds.launch:World.__init__", "worlds.launch:World.run", "worlds.launch:World.close"],
    "keeping": ["records.saved_result:keep_result", "runner.engines:keep_description"],
    "loading": ["runner.schedules:load_schedules", "records.observation:read_tree"],
    "judging": ["verdicts.judgement:judge", "records.ledger_summary:summarize"],
    "record": ["records.record:to_json", "records.run:RunWriter.append"],
}
STAGES_OF_FORKS = {
    "worlds": ["worlds.processes.host_process:host_main", "worlds.processes.host_process:_join"],
    "oracle": ["oracle.oracle:_exact", "oracle.oracle:_with_lagging", "oracle.oracle_answer:_answer"],
    "noise runs": ["oracle.oracle_noise:noise_of"],
    "training": ["training.rank_body:drive_rank"],
    "keeping": ["records.observation:save_observation", "records.observation:digest"],
}
_local = threading.local()


# Any, here and below: functions of all kinds.
def _timed(stage: str, function: Callable[..., Any], file: int) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        open_stages: list[list[Any]] = _local.__dict__.setdefault("open", [])
        open_stages.append([timed, 0.0])
        started = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            taken = time.thread_time() - started
            _, inside = open_stages.pop()
            if open_stages:
                open_stages[-1][1] += taken
            _write(file, stage, taken - inside)

    return timed


def _write(file: int, stage: str, seconds: float) -> None:
    os.write(file, f"{os.getpid()} {seconds:.6f} {stage}\n".encode())


def find(path: str) -> tuple[Any, str]:
    """Return the holder of a function, and its name there."""
    module, _, attribute = path.partition(":")
    owner: Any = importlib.import_module(f"shardproof.harness.{module}")
    *classes, name = attribute.split(".")
    for part in classes:
        owner = getattr(owner, part)
    return owner, name


def _time_all(stages: dict[str, list[str]], file: int) -> None:
    for stage, paths in stages.items():
        for path in paths:
            owner, name = find(path)
            function = getattr(owner, name)
            timed = _timed(stage, function, file)
            # In every module that imported it.
            for place in [owner, *(m for n, m in list(sys.modules.items()) if n.startswith("shardproof"))]:
                if getattr(place, name, None) is function:
                    setattr(place, name, timed)


_file = os.open(os.environ[FILE], os.O_CREAT | os.O_APPEND | os.O_WRONLY) if FILE in os.environ else -1
if any("multiprocessing.forkserver" in argument for argument in sys.orig_argv):
    _time_all(STAGES_OF_FORKS, _file)
    _write(_file, IMPORTS, time.process_time())
elif _file >= 0:
    for server in forkserver._servers:
        server.set_forkserver_preload = functools.partial(
            lambda preload, modules: preload([*modules, __name__]), server.set_forkserver_preload
        )


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Start timing: all imports are done."""
    _time_all(STAGES_OF_SESSION, _file)
    _write(_file, IMPORTS, time.process_time())


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop timing."""
    _write(_file, SESSION, time.process_time())
