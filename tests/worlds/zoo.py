"""Ranks that misbehave, each in one way: module-level rank bodies, run inside worlds by test_zoo.py."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from shardproof.harness.worlds.rank import RankContext

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


ZOO: dict[str, Callable[[RankContext], None]] = {
    body.__name__: body
    for body in (
        raises,
        exits,
        exits_cleanly,
        calls_sys_exit,
        is_killed,
        segfaults,
        skips,
        hangs_in_compute,
        hangs_in_a_collective_the_others_left,
        raises_late_while_others_time_out,
    )
}
