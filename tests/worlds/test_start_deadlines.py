"""A request to another process has a deadline, whatever the state of the fork server."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardproof import RankContext, WorldKind, WorldSpec
from shardproof.harness.cli.exit_codes import INTERRUPTED
from shardproof.harness.cli.main import main
from shardproof.harness.errors import HarnessBug
from shardproof.harness.worlds.launch import World, launch
from shardproof.harness.worlds.processes import forkserver
from shardproof.harness.worlds.processes.forkserver import STATUS_WITHOUT_SERVER, end, end_server, started
from shardproof.harness.worlds.processes.fresh_process import NoAnswerError, ask
from shardproof.harness.worlds.processes.lineage import below, can_adopt, has_ended, parent_of
from tests.shell import python
from tests.worlds import ends

LIMIT_S = 1.0
# Far from a minute, for busy machines.
SOON_S = 20.0
LOOPS = "tests.waiting_engine:Loops"


@pytest.fixture
def server() -> Iterator[int]:
    """Return the pid of a warm server, which runs on afterwards unless the test has ended it."""
    server = _server()
    yield server
    with contextlib.suppress(ProcessLookupError):
        os.kill(server, signal.SIGCONT)


def _server() -> int:
    process = started(_wait, limit_s=60.0)
    server = parent_of(process.pid or 0)
    end(process)
    assert server is not None
    return server


def _wait() -> None:
    signal.pause()


def _answer() -> bytes:
    return b"here"


def _stop_server(context: RankContext) -> int:
    server = os.getppid()
    if context.rank == 0:
        os.kill(server, signal.SIGSTOP)
    return server


def test_a_stopped_server_costs_one_deadline_and_is_replaced(server: int) -> None:
    os.kill(server, signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(HarnessBug, match="the fork server: expected a new process, got nothing within 1 s"):
        started(_wait, limit_s=LIMIT_S)
    assert time.monotonic() - begun < SOON_S
    assert has_ended(server)
    next_server = _server()
    os.kill(next_server, signal.SIGSTOP)
    with pytest.raises(NoAnswerError, match="could not be started: the fork server"):
        ask(LIMIT_S, 10, _answer)
    assert ask(60.0, 10, _answer) == b"here"


def test_a_server_that_is_stopped_in_its_imports_has_no_minute(server: int) -> None:
    end_server()
    forkserver._ensure_server()
    reaper = forkserver._pid()
    assert reaper is not None
    limit = time.monotonic() + SOON_S
    while not (found := below(reaper)):
        assert time.monotonic() < limit
    os.kill(found[0].pid, signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(HarnessBug, match="nothing within 1 s"):
        started(_wait, limit_s=LIMIT_S)
    assert time.monotonic() - begun < SOON_S


_ENDS_AS_IT_STARTS = """
import os, signal, sys
from shardproof.harness.worlds.processes import forkserver
forkserver._WARM = sys.argv[1]
forkserver.forkserver_context()
forkserver._ensure_server()
print(forkserver._pid(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not can_adopt(), reason="there is no reaper without a subreaper")
def test_a_server_whose_session_ended_before_it_began_ends_in_its_imports(tmp_path: Path) -> None:
    (tmp_path / "takes_long.py").write_text("import time; time.sleep(120)")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    script = [sys.executable, "-c", _ENDS_AS_IT_STARTS, "takes_long"]
    output = tmp_path / "output"
    with output.open("wb") as file:  # the server would keep a pipe open
        subprocess.run(script, env={**os.environ, "PYTHONPATH": path}, stdout=file, check=False)
    reaper, limit = int(output.read_text()), time.monotonic() + 30.0
    while not has_ended(reaper) and time.monotonic() < limit:
        time.sleep(0.05)
    assert has_ended(reaper)


def test_a_world_on_a_stopped_server_is_our_error(server: int, tmp_path: Path) -> None:
    os.kill(server, signal.SIGSTOP)
    with pytest.raises(HarnessBug, match="the fork server"):
        World(WorldSpec(kind=WorldKind.PROCESSES, size=2, deadline_s=LIMIT_S), tmp_path)
    assert launch(
        WorldSpec(kind=WorldKind.PROCESSES, size=2), ends.leaves_a_daemon_thread, folder=tmp_path / "next"
    ).is_clean


def test_a_server_that_stops_during_a_case_is_not_the_ranks_fault(server: int, tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(HarnessBug, match="expected the fork server to report the end of the host"):
        launch(WorldSpec(kind=WorldKind.PROCESSES, size=2, deadline_s=3.0), _stop_server, folder=tmp_path)
    assert time.monotonic() - begun < 10.0  # the deadline, a second, and a busy machine
    assert has_ended(server)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_ends_is_replaced_in_any_state_of_its_keeper(
    server: int, number: signal.Signals
) -> None:
    reaper = parent_of(server)
    assert reaper is not None
    os.kill(reaper, number)
    if number is signal.SIGSTOP:
        os.kill(server, signal.SIGKILL)
    assert ask(60.0, 10, _answer) == b"here"
    assert has_ended(reaper)
    assert has_ended(server)


def test_a_process_that_lost_server_and_keeper_is_ended(server: int) -> None:
    process = started(_wait, limit_s=60.0)
    pid, reaper = process.pid, parent_of(server)
    assert pid is not None
    assert reaper is not None
    os.kill(reaper, signal.SIGKILL)
    process.join(SOON_S)
    assert process.exitcode == STATUS_WITHOUT_SERVER
    assert not has_ended(pid)
    end(process)
    limit = time.monotonic() + SOON_S
    while not has_ended(pid):
        assert time.monotonic() < limit


def test_a_new_server_has_the_environment_of_the_first(server: int) -> None:
    os.kill(server, signal.SIGKILL)
    assert ask(60.0, 10, _threads) == b"1"


def _threads() -> bytes:
    return os.environ["OMP_NUM_THREADS"].encode()


def test_a_signal_to_the_group_of_the_session_reaches_no_server(server: int) -> None:
    reaper = parent_of(server)
    assert reaper is not None
    assert os.getpgid(server) == os.getpgid(reaper) != os.getpgid(0)
    assert forkserver._pid() == reaper


def test_an_engine_that_never_answers_is_named_at_the_deadline(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--engine", LOOPS, "--suite", "smoke", "--deadline", "1", "--out", str(tmp_path / "run")]
    begun = time.monotonic()
    assert main(["run", *arguments]) == 2
    assert time.monotonic() - begun < SOON_S
    why = "the process that was asked for its version and capabilities took longer than 1 s"
    assert f"engine '{LOOPS}': {why}" in capsys.readouterr().err


def test_an_interrupted_question_ends_in_one_line(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, threading, time; from pathlib import Path\n"
        "from shardproof.harness.cli.main import main\n"
        "from shardproof.harness.worlds.processes.forkserver import warm_up\n"
        "warm_up(); threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        f"sys.exit(main(['run', '--engine', '{LOOPS}', '--suite', 'smoke', '--out', {str(tmp_path / 'run')!r}]))\n"
    )
    done = python("-c", program)
    assert done.returncode == INTERRUPTED
    assert done.stderr == "shardproof: interrupted\n"


def test_a_full_temporary_folder_is_no_verdict(tmp_path: Path) -> None:
    program = (
        "import resource, sys; from shardproof.harness.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        f"sys.exit(main(['run', '--engine', 'torch.ddp', '--out', {str(tmp_path / 'run')!r}]))\n"
    )
    done = python("-c", program)
    assert done.returncode == 2, done.stderr
    assert "the temporary folder: expected one with room" in done.stderr
    assert "Traceback" not in done.stderr
