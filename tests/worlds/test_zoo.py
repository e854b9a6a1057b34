"""Ranks that misbehave, each in one way, are red in both kinds of world, with the cause as headline."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardproof import RankContext, Verdict, launch
from shardproof.harness.records.saved_result import keep_result, load_kept
from shardproof.harness.verdicts.judgement import judge_failure
from shardproof.harness.worlds.outcome import Abandoned, Died, Outcome, Raised, Returned, TimedOut
from shardproof.harness.worlds.spec import OWN_KINDS, WorldKind, WorldSpec

CULPRIT = 1


def _reduce() -> None:
    dist.all_reduce(torch.ones(4))


def raises(context: RankContext) -> None:
    """Raise while the others wait for it."""
    if context.rank == CULPRIT:
        raise ValueError("the weights are wrong")
    _reduce()


def exits(context: RankContext) -> None:
    """End the process with a status, skipping every handler."""
    if context.rank == CULPRIT:
        os._exit(3)
    _reduce()


def exits_cleanly(context: RankContext) -> None:
    """End the process with status zero, without a result."""
    if context.rank == CULPRIT:
        os._exit(0)
    _reduce()


def calls_sys_exit(context: RankContext) -> None:
    """Leave by SystemExit, which `except Exception` does not see."""
    if context.rank == CULPRIT:
        sys.exit(1)
    _reduce()


def is_killed(context: RankContext) -> None:
    """Be killed, as by the kernel when memory runs out."""
    if context.rank == CULPRIT:
        os.kill(os.getpid(), signal.SIGKILL)
    _reduce()


def segfaults(context: RankContext) -> None:
    """Read address zero."""
    if context.rank == CULPRIT:
        ctypes.string_at(0)
    _reduce()


def skips(context: RankContext) -> None:
    """Skip the test, which no runner may count as a pass."""
    if context.rank == CULPRIT:
        pytest.skip("not today")
    _reduce()


def hangs_in_compute(context: RankContext) -> None:
    """Never reach the collective that the other ranks wait in."""
    if context.rank == CULPRIT:
        threading.Event().wait()
    _reduce()


def hangs_in_a_collective_the_others_left(context: RankContext) -> None:
    """Call one collective more than the other ranks."""
    _reduce()
    if context.rank == CULPRIT:
        _reduce()


def raises_late_while_others_time_out(context: RankContext) -> None:
    """Raise long after the others' collective has timed out."""
    if context.rank == CULPRIT:
        threading.Event().wait(2.0)
        raise ValueError("late, but the cause")
    _reduce()


DEADLINE_S = 3.0
KINDS = [*OWN_KINDS, WorldKind.LAUNCHED]


def _spec(kind: WorldKind, *, collective_timeout_s: float | None = None) -> WorldSpec:
    return WorldSpec(kind=kind, size=2, deadline_s=DEADLINE_S, collective_timeout_s=collective_timeout_s)


Animal = Callable[[RankContext], None]
# Each animal's own outcome, the verdict, and a part of the headline.
ZOO: dict[Animal, tuple[type[Outcome], Verdict, str]] = {
    raises: (Raised, Verdict.CRASHED, "rank 1 raised ValueError: the weights are wrong"),
    exits: (Died, Verdict.CRASHED, "rank 1 exited with status 3"),
    exits_cleanly: (Died, Verdict.CRASHED, "rank 1 exited with status 0"),
    calls_sys_exit: (Raised, Verdict.CRASHED, "rank 1 raised SystemExit: the rank called sys.exit(1)"),
    is_killed: (Died, Verdict.CRASHED, "rank 1 was killed by SIGKILL"),
    segfaults: (Died, Verdict.CRASHED, "rank 1 was killed by SIGSEGV"),
    skips: (Raised, Verdict.CRASHED, "the rank skipped (not today); a rank may not skip"),
    hangs_in_compute: (TimedOut, Verdict.HUNG, "rank 0 waits in all_reduce"),
    hangs_in_a_collective_the_others_left: (TimedOut, Verdict.HUNG, "rank 1 waits in all_reduce"),
    raises_late_while_others_time_out: (
        Raised,
        Verdict.CRASHED,
        "rank 1 raised ValueError: late, but the cause",
    ),
}


def _all_reduce(context: RankContext) -> float:
    mine = torch.ones(1)
    dist.all_reduce(mine)
    return float(mine)


def _open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> WorldKind:
    """A kind of world that has run before, so that the fork server's own files are open."""
    kind: WorldKind = request.param
    if kind is WorldKind.LAUNCHED:
        request.getfixturevalue("launched")
    launch(_spec(kind), _all_reduce, folder=tmp_path_factory.mktemp("before"))
    return kind


@pytest.mark.parametrize("animal", ZOO)
def test_is_red_with_the_true_cause(animal: Animal, kind: WorldKind, tmp_path: Path) -> None:
    expected_outcome, expected_verdict, headline = ZOO[animal]
    timeout_s = 1.0 if animal is raises_late_while_others_time_out else None
    open_before = _open_files()
    started = time.monotonic()

    result = launch(_spec(kind, collective_timeout_s=timeout_s), animal, folder=tmp_path / "zoo")

    assert time.monotonic() - started < DEADLINE_S + 2
    assert not result.is_clean
    culprit = result.outcomes[CULPRIT]
    # In the threads world a rank left alone in a collective raises at once instead of timing out.
    is_deadlock = (
        kind is WorldKind.THREADS and isinstance(culprit, Raised) and culprit.kind == "DeadlockError"
    )
    assert isinstance(culprit, expected_outcome) or is_deadlock
    keep_result(result, tmp_path / "zoo")
    judgement = judge_failure(load_kept(tmp_path / "zoo"))
    assert judgement.verdict is expected_verdict, judgement.headline
    assert headline in judgement.headline.replace(f" on {socket.gethostname()}", "")
    is_named = kind is WorldKind.LAUNCHED and "rank" in headline
    assert not is_named or f" on {socket.gethostname()}" in judgement.headline
    assert [o.rank for o in judgement.outcomes] == [0, 1]

    again = launch(_spec(kind), _all_reduce, folder=tmp_path / "after")
    assert [o.value for o in again.outcomes if isinstance(o, Returned)] == [2.0, 2.0]
    assert _open_files() <= open_before


def _forks_and_returns(context: RankContext) -> None:
    if context.rank == CULPRIT and os.fork() == 0:
        time.sleep(600)  # the process that must not outlive the world


def test_ends_processes_that_a_rank_left_behind(kind: WorldKind, tmp_path: Path) -> None:
    result = launch(_spec(kind), _forks_and_returns, folder=tmp_path)

    assert all(isinstance(o, Returned) for o in result.outcomes)
    assert not result.is_clean
    assert "left processes behind" in result.leaks[0]


def test_accounts_for_the_innocent(kind: WorldKind, tmp_path: Path) -> None:
    result = launch(_spec(kind), is_killed, folder=tmp_path)

    assert isinstance(result.outcomes[0], Abandoned | Raised)
