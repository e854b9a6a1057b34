"""A run that is interrupted keeps its records, and one that is killed leaves no process and no file behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from campaigns.live_run import LiveRun
from shardproof.harness.cli import judged_cases
from shardproof.harness.cli.exit_codes import INTERRUPTED
from shardproof.harness.cli.main import main
from shardproof.harness.records.record import Verdict
from shardproof.harness.records.run import read_run
from shardproof.harness.runner import interruption
from shardproof.harness.runner.interruption import interruptible, uninterrupted

# Far above the usual time, for busy machines. Only a failing test waits so long.
LIMIT_S = 60.0
WAITS = "tests.waiting_engine:Waits"
# A run of two engines: the first passes, the second waits for ever.
ARGUMENTS = [
    *("--engine", "torch.ddp", "--engine", WAITS, "--suite", "smoke", "-k", "trains", "--world", "threads:2"),
    *("--deadline", "100"),
]
Signal = Callable[[int, signal.Signals], None]


@pytest.fixture
def waiting(short_folder: Path, request: pytest.FixtureRequest) -> Iterator[LiveRun]:
    """Start a run, and wait until one engine has passed and the other waits."""
    run = LiveRun(short_folder, [*ARGUMENTS, *request.param])
    try:
        run.wait_until(lambda: _waits(run) and len(run.records()) == 1, LIMIT_S)
        yield run
    finally:
        run.end()


def _waits(run: LiveRun) -> bool:
    """Return whether a rank has touched its file, in the temporary folder of its world."""
    return any("waiting" in names for _, _, names in os.walk(run.temporary))


def _assert_nothing_is_left(run: LiveRun) -> None:
    assert run.orphans(LIMIT_S) == []
    assert run.litter() == []


@pytest.mark.slow
@pytest.mark.parametrize("waiting", [[], ["-n2"]], indirect=True, ids=["one-process", "workers"])
def test_ctrl_c_once_keeps_records_and_reports(waiting: LiveRun) -> None:
    os.killpg(waiting.process.pid, signal.SIGINT)  # as a terminal does
    assert waiting.ended(LIMIT_S) == 130, waiting.said()
    _assert_nothing_is_left(waiting)
    run = read_run(waiting.out)
    assert run.footer is not None
    assert {r.engine: r.verdict for r in run.records} == {
        "torch.ddp": Verdict.PASSED,
        WAITS: Verdict.NOT_RUN,
    }
    assert (waiting.out / "report.html").exists()


KILLS = [
    pytest.param(["-n2"], os.kill, signal.SIGTERM, id="workers-SIGTERM"),
    pytest.param(["-n1"], os.killpg, signal.SIGKILL, id="worker-SIGKILL-to-all"),
    pytest.param([], os.killpg, signal.SIGTERM, id="one-process-SIGTERM-to-all"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("waiting", "send", "number"), KILLS, indirect=["waiting"])
def test_a_run_that_is_killed_leaves_its_records_alone(
    waiting: LiveRun, send: Signal, number: signal.Signals
) -> None:
    send(waiting.process.pid, number)
    assert waiting.ended(LIMIT_S) == -number
    _assert_nothing_is_left(waiting)
    (record,) = read_run(waiting.out).records
    assert record.verdict is Verdict.PASSED
    assert main(["report", str(waiting.out)]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("waiting", [["-n1"]], indirect=True, ids=["worker"])
def test_ctrl_c_twice_ends_at_once(waiting: LiveRun) -> None:
    # The worker is stopped, so that the first signal cannot end the run.
    for found in waiting.processes():
        if found.role == "worker":
            os.kill(found.pid, signal.SIGSTOP)
    os.kill(waiting.process.pid, signal.SIGINT)
    # The kernel hands two signals over as one, until the main thread has taken the first.
    waiting.wait_until(lambda: _ends_by_another(waiting), LIMIT_S)
    assert waiting.ended(LIMIT_S) == -signal.SIGINT, waiting.said()
    _assert_nothing_is_left(waiting)
    assert len(read_run(waiting.out).records) == 1


def _ends_by_another(run: LiveRun) -> bool:
    """Interrupt the process once more, unless it has ended; return whether it has."""
    if run.process.poll() is not None:
        return True
    os.kill(run.process.pid, signal.SIGINT)
    return False


def _write_twice(done: list[str]) -> None:
    with interruptible():
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("first")
        done.append("second")


def _fail_to_write() -> None:
    with interruptible(), uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        raise OSError("full")


def test_a_write_is_finished_before_an_interrupt() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        _write_twice(done)
    assert done == ["first"]
    assert not interruption._handlers


def test_an_error_in_a_write_is_not_hidden_by_an_interrupt() -> None:
    with pytest.raises(OSError, match="full"):
        _fail_to_write()


def _select(monkeypatch: pytest.MonkeyPatch, call: Callable[[], int]) -> list[int]:
    """Let a run call this instead of pytest; returns the exit codes that it concluded from."""
    concluded: list[int] = []

    def code_of_run(out: Path, code: int, _render: object) -> int:
        if not concluded:
            os.kill(os.getpid(), signal.SIGINT)
        concluded.append(code)
        return 0

    monkeypatch.setattr(judged_cases, "call_pytest", lambda *arguments: call())
    monkeypatch.setattr(judged_cases, "code_of_run", code_of_run)
    return concluded


def test_ctrl_c_while_the_reports_are_written_lets_them_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    concluded = _select(monkeypatch, lambda: 0)
    assert main(["run", "--suite=smoke", "--engine=torch.ddp"]) == INTERRUPTED
    assert concluded == [0]


def test_ctrl_c_as_pytest_ends_still_writes_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    concluded = _select(monkeypatch, interrupted)
    assert main(["run", "--suite=smoke", "--engine=torch.ddp"]) == INTERRUPTED
    assert concluded == [2]
