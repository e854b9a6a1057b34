"""The process tree of Linux: which processes run below a process, and which process adopts orphans.

Other systems have no /proc and no subreaper: the functions then return nothing, and `can_adopt` returns False.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_FIRST = 1  # the machine's first process; 0 and below stand for groups of processes, or for all
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process. Pids are reused; ``started_ticks`` distinguishes the processes with one pid."""

    pid: int
    parent: int
    session: int
    started_ticks: int
    is_running: bool
    is_stopped: bool = False


def can_adopt() -> bool:
    """Return whether a process of this machine can become the parent of all orphans below it."""
    if not sys.platform.startswith("linux") or not (_PROC / "self" / "stat").exists():
        return False
    return _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(ctypes.c_int())) == 0


def adopt_orphans() -> bool:
    """Make the calling process the parent of every orphan below it; returns whether that is possible here."""
    return can_adopt() and _prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0


def die_with_parent() -> None:
    """Make the kernel kill the calling process when its parent thread ends; no effect where the kernel cannot."""
    if sys.platform.startswith("linux"):
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def process_of(pid: int) -> Process | None:
    """Look up a process; None if it has ended and was waited for, or cannot be looked up."""
    text = _read(_PROC / str(pid) / "stat")
    if not text:
        return None
    fields = text.rpartition(")")[2].split()  # the name may contain any character, brackets included
    return Process(
        pid=pid,
        parent=int(fields[1]),
        session=int(fields[3]),
        started_ticks=int(fields[19]),
        # The first thread of a process may have ended before the others, which the state does not show.
        is_running=fields[0] not in "ZX" or int(fields[17]) > 1,
        is_stopped=fields[0] == "T",
    )


def parent_of(pid: int) -> int | None:
    """Return the parent of a process; None if it has ended or cannot be looked up."""
    process = process_of(pid)
    return None if process is None else process.parent


def command(pid: int) -> str:
    """Return the command line of a process; empty if it has ended or cannot be looked up."""
    return _read(_PROC / str(pid) / "cmdline").replace("\0", " ").strip()


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, waited for or not."""
    process = process_of(pid)
    return process is None or not process.is_running


def is_running(process: Process) -> bool:
    """Return whether this very process still runs; a zombie does not."""
    now = process_of(process.pid)
    return now is not None and now.is_running and now.started_ticks == process.started_ticks


def below(pid: int, *, without: int | None = None) -> list[Process]:
    """Return the running processes below one, except the branch of ``without``; the nearest first.

    For the machine's first process the result is empty: it adopts every orphan, so all others are below it.
    """
    found: list[Process] = []
    ways = [pid] if pid > _FIRST else []
    while ways:
        for child in _children(ways.pop(0)):
            if child == without:
                continue
            ways.append(child)
            process = process_of(child)
            if process is not None and process.is_running:
                found.append(process)
    return found


def signalled(pid: int, number: signal.Signals) -> bool:
    """Send a signal to one process; returns whether the process existed. Refuses numbers that stand for many."""
    if pid <= _FIRST:
        return False
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _children(pid: int) -> list[int]:
    """Return the children of a process, from the kernel's own list if it has one, else by a scan of all processes."""
    try:
        threads = os.listdir(_PROC / str(pid) / "task")
        lists = [(_PROC / str(pid) / "task" / thread / "children").read_text() for thread in threads]
    except FileNotFoundError:
        return [] if process_of(pid) is None else _children_by_walk(pid)
    except OSError:
        return []
    return [int(child) for line in lists for child in line.split()]


def _children_by_walk(pid: int) -> list[int]:
    everything = [process_of(int(name)) for name in os.listdir(_PROC) if name.isdigit()]
    return [process.pid for process in everything if process is not None and process.parent == pid]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has ended, or there is no /proc
        return ""


def _prctl(option: int, argument: int) -> int:
    return int(ctypes.CDLL(None).prctl(option, ctypes.c_ulong(argument), 0, 0, 0))
