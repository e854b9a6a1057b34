"""Fixtures of several files of tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from shardproof import Source, TrialSession, WorldKind
from shardproof.harness.worlds.launched.cluster import open_cluster
from shardproof.harness.worlds.launched.launcher import launched_process
from shardproof.harness.worlds.processes.forkserver import draw_hash_seeds, warm_up
from tests.shell import ROOT

# No test may fail because the machine is busy.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# The program of a process that a launcher starts beside the one that judges.
_SERVE = """
import os
from shardproof.harness.worlds.launched.agent import serve
from shardproof.harness.worlds.launched.launcher import launched_process
serve(launched_process(os.environ))
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with slow tests first: all workers wait for a slow file that a worker begins last."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture
def session(tmp_path: Path) -> Iterator[TrialSession]:
    """Judge cases, and keep observations below the test's own folder."""
    session = TrialSession(Source(folder=tmp_path))
    yield session
    session.close()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Make a folder for sockets, whose paths have at most some hundred characters; a test's folder has more."""
    with tempfile.TemporaryDirectory(prefix="sp") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def warm() -> None:
    """Start the fork server, so that no test's duration includes its imports."""
    warm_up()


@pytest.fixture(scope="session")
def launched() -> Iterator[None]:
    """Make this process the first of two of a launcher; the other one ends with it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {**os.environ, **variables, "RANK": "1"}
    with subprocess.Popen([sys.executable, "-c", _SERVE], cwd=ROOT, env=environment) as agent:
        open_cluster(launched_process({**variables, "RANK": "0"}), seed=0)
        yield
        agent.kill()


@pytest.fixture(autouse=True)
def _hash_seeds_of_a_new_session() -> None:
    """Let no test depend on the order of tests: a session of an earlier test may have drawn other seeds."""
    draw_hash_seeds(0)


@pytest.fixture(autouse=True)
def _launched_where_asked(request: pytest.FixtureRequest) -> None:
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and callspec.params.get("kind") is WorldKind.LAUNCHED:
        request.getfixturevalue("launched")
