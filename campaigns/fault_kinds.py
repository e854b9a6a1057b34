"""The faults of the campaign: how a live run is disturbed, at a moment drawn from a seed, and what that proves."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from campaigns.live_run import Found, LiveRun, state_of

_POLL_S = 0.005
_STATE_LIMIT_S = 0.5
# The longest wait for a target: as long as a server may need for its imports on a busy machine.
_TARGET_LIMIT_S = 25.0
_LONGEST_DELAY_S = 0.25  # about the lifetime of a host


class Miss(Enum):
    """A target of the campaign that was missed."""

    FALSE_GREEN = "false green"
    ORPHAN = "orphan"
    LITTER = "left over"  # temporary files, shared memory, descriptors
    LOST = "lost record"
    LATE = "late"
    UNREADABLE = "unreadable"  # a command ended with a traceback, or with a meaningless code


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One signal to processes of one role; ``are_threads`` chooses hosts by the kind of their ranks."""

    role: str
    number: signal.Signals
    are_threads: bool | None = None
    is_twice: bool = False
    is_group: bool = False

    def __str__(self) -> str:
        alone = f"group of the {self.role}" if self.is_group else self.role
        who = {True: "host of threads", False: "process of a rank", None: alone}[self.are_threads]
        return f"{self.number.name}{' twice' if self.is_twice else ''} to {who}"


@dataclass(slots=True, kw_only=True)
class Fault:
    """One fault and what followed. ``worlds`` are the folders whose cases must not pass."""

    kind: str
    is_done: bool = False
    at_s: float = 0.0
    worlds: tuple[str, ...] = ()
    verdicts: tuple[str, ...] = ()
    headlines: tuple[str, ...] = ()
    misses: list[tuple[Miss, str]] = field(default_factory=list)


_FATAL = (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT)
# Faults that a run survives, with weights: stops cost a deadline each, and a new server its imports.
STRIKES: dict[Kind, float] = {
    **{Kind(role="host", number=n, are_threads=t): 3.0 for n in _FATAL for t in (True, False)},
    **{Kind(role="host", number=signal.SIGSTOP, are_threads=t): 1.0 for t in (True, False)},
    Kind(role="reaper", number=signal.SIGKILL): 1.0,
    Kind(role="server", number=signal.SIGKILL): 1.0,
    Kind(role="server", number=signal.SIGSTOP): 1.0,
    Kind(role="question", number=signal.SIGKILL): 1.0,
    Kind(role="worker", number=signal.SIGKILL): 1.5,
    Kind(role="worker", number=signal.SIGTERM): 1.0,
}
ENDINGS = (
    Kind(role="run", number=signal.SIGINT),
    Kind(role="run", number=signal.SIGINT, is_twice=True),
    Kind(role="run", number=signal.SIGTERM),
    Kind(role="run", number=signal.SIGKILL),
    Kind(role="run", number=signal.SIGINT, is_group=True),
    Kind(role="run", number=signal.SIGKILL, is_group=True),
)


def strike(run: LiveRun, kind: Kind, rng: random.Random, look: Callable[[], list[Found]]) -> Fault:
    """Wait for a process to strike, and for a moment of its life; ``look`` lists the processes of the run."""
    fault = Fault(kind=str(kind))
    before = {found.pid for found in look() if found.role == kind.role}
    delay_s = rng.uniform(0.0, _LONGEST_DELAY_S)
    limit = time.monotonic() + _TARGET_LIMIT_S
    while time.monotonic() < limit and run.process.poll() is None:
        found = look()
        targets = [f for f in found if _is_target(f, kind)]
        # A host that was there already may be about to end: another one has its whole life before it.
        targets = [f for f in targets if f.role not in {"host", "question"} or f.pid not in before]
        if targets:
            time.sleep(delay_s)
            _strike(rng.choice(targets), kind, fault, look)
            return fault
        time.sleep(_POLL_S)
    return fault


def _is_target(found: Found, kind: Kind) -> bool:
    if found.role != kind.role:
        return False
    return kind.are_threads is None or kind.are_threads == ("/threads-" in found.world)


def _strike(target: Found, kind: Kind, fault: Fault, look: Callable[[], list[Found]]) -> None:
    fault.at_s = time.monotonic()
    if kind.role in {"run", "worker"}:
        fault.is_done = _sent(target.pid, kind.number, os.killpg if kind.is_group else os.kill)
        if kind.is_twice:
            time.sleep(_POLL_S)
            _sent(target.pid, kind.number)
        return
    if target.role == "server" and kind.number is signal.SIGKILL:
        # A stopped server reports no end: hosts that run now end without one, and cannot end in good order.
        _sent(target.pid, signal.SIGSTOP)
        _await_state(target.pid, "T")
        fault.worlds = tuple({f.world for f in look() if f.world and f.parent == target.pid})
    fault.is_done = _is_struck(target.pid, kind.number)
    if target.role == "host" and fault.is_done:
        fault.worlds = (target.world,)


def _is_struck(pid: int, number: signal.Signals) -> bool:
    """Send a signal to a process that is surely alive: it is stopped first, so it cannot end by itself meanwhile."""
    if not _sent(pid, signal.SIGSTOP) or not _await_state(pid, "T"):
        _sent(pid, signal.SIGCONT)
        return False
    if number is not signal.SIGSTOP:
        _sent(pid, number)
        _sent(pid, signal.SIGCONT)
    return True


def _sent(pid: int, number: signal.Signals, send: Callable[[int, signal.Signals], None] = os.kill) -> bool:
    """Send a signal; returns whether the process had not ended before."""
    is_alive = state_of(pid) not in "ZX"
    with contextlib.suppress(ProcessLookupError):
        send(pid, number)
    return is_alive


def _await_state(pid: int, letters: str) -> bool:
    limit = time.monotonic() + _STATE_LIMIT_S
    while time.monotonic() < limit:
        if (state := state_of(pid)) in letters:
            return True
        if state in "ZX":
            return False
        time.sleep(_POLL_S / 10)
    return False
