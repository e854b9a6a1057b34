"""A run of the command line in processes of its own: its live processes, and the files that it leaves. Needs /proc."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_PROC = Path("/proc")
_POLL_S = 0.01
# Torch keeps its compilation cache there, and pytest the folders of its last three sessions.
_NOT_OURS = ("torchinductor_", "pytest-of-")

Role = str  # run, worker, reaper, server, host, question (a process that answers one request), tracker, other


class LateError(Exception):
    """An awaited event did not come within its limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One live process of a run. ``world`` is the folder of a host's observations; empty elsewhere."""

    pid: int
    parent: int
    role: Role
    world: str = ""


class LiveRun:
    """One run, in a session of its own, whose processes carry its temporary folder in their environment."""

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        *,
        longest_file: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start ``shardproof run``; no process of it can write a file of more than ``longest_file`` bytes.

        The path of ``folder`` must be short: sockets live below it.
        """
        self.out = folder / "run"
        self.temporary = folder / "tmp"
        self.log = folder / "log"
        self.temporary.mkdir(parents=True)
        self.pids: set[int] = set()
        self._mark = f"TMPDIR={self.temporary}".encode()
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        # Its output goes through a pipe: its terminal does not fill up with its disk.
        with self.log.open("wb") as log:
            self._terminal = subprocess.Popen(
                ["cat"], stdin=subprocess.PIPE, stdout=log, start_new_session=True
            )
        assert self._terminal.stdin is not None
        with self._terminal.stdin as terminal:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "shardproof.harness.cli.main",
                    "run",
                    *arguments,
                    "--keep=all",
                    "--out",
                    str(self.out),
                ],
                cwd=ROOT,
                env={**os.environ, "TMPDIR": str(self.temporary), "PYTHONPATH": path, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=terminal,
                stderr=terminal,
                start_new_session=True,
            )
        if longest_file is not None:
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (longest_file, longest_file))

    def records(self) -> list[str]:
        """Return the complete lines of records that are on the disk."""
        with contextlib.suppress(OSError):
            return (self.out / "records.jsonl").read_text().split("\n")[:-1]
        return []

    def processes(self) -> list[Found]:
        lines = {int(name): self._command(int(name)) for name in os.listdir(_PROC) if name.isdigit()}
        ours = {pid: line for pid, line in lines.items() if line is not None}
        self.pids |= set(ours)
        parents = {pid: _parent(pid) for pid in ours}
        return [self._found(pid, line, ours, parents) for pid, line in ours.items()]

    def num_descriptors(self) -> int:
        """Count the open descriptors of the main process; 0 if it has ended."""
        try:
            return len(os.listdir(_PROC / str(self.process.pid) / "fd"))
        except OSError:
            return 0

    def wait_until(self, is_so: Callable[[], bool], limit_s: float) -> None:
        """Wait for a condition; raises LateError after ``limit_s``."""
        limit = time.monotonic() + limit_s
        while not is_so():
            if time.monotonic() > limit:
                raise LateError(f"not so after {limit_s:g} s: {is_so}")
            time.sleep(_POLL_S)

    def ended(self, limit_s: float) -> int:
        """Wait for the main process to end; returns its exit code."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise LateError(f"the run has not ended after {limit_s:g} s") from None

    def orphans(self, limit_s: float) -> list[Found]:
        """Return the processes that are still alive ``limit_s`` after the main process has ended."""
        limit = time.monotonic() + limit_s
        while (found := self.processes()) and time.monotonic() < limit:
            time.sleep(_POLL_S)
        return found

    def litter(self) -> list[str]:
        """List temporary files and shared memory that the run has left."""
        left = [name for name in os.listdir(self.temporary) if not name.startswith(_NOT_OURS)]
        shared = os.listdir("/dev/shm") if Path("/dev/shm").is_dir() else []
        marks = tuple(f"_{pid}_" for pid in self.pids)
        return left + [name for name in shared if any(mark in name for mark in marks)]

    def said(self) -> str:
        """Return the run's output, complete once no process of the run is alive."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._terminal.wait(0.2)
        return self.log.read_text(errors="replace")

    def end(self) -> None:
        for _ in range(3):
            for found in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(found.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self._terminal.wait()

    def _command(self, pid: int) -> str | None:
        """Return the command line of a live process of the run, else None."""
        try:
            if self._mark not in (_PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                return None
            return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return None

    def _found(self, pid: int, line: str, lines: Mapping[int, str], parents: Mapping[int, int]) -> Found:
        parent = parents[pid]
        world = ""
        if pid == self.process.pid:
            role = "run"
        elif "resource_tracker" in line:
            role = "tracker"
        elif "multiprocessing.forkserver" in line:
            depth = _depth(pid, lines, parents)
            world = _world(pid) if depth == 2 else ""
            role = ("reaper", "server", "host" if world else "question")[depth] if depth < 3 else "other"
        else:
            role = "worker" if parent == self.process.pid else "other"
        return Found(pid=pid, parent=parent, role=role, world=world)


def state_of(pid: int) -> str:
    """Return the kernel's letter for the state of a process; Z if it has ended."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def _parent(pid: int) -> int:
    try:
        return int((_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _depth(pid: int, lines: Mapping[int, str], parents: Mapping[int, int]) -> int:
    """Count the fork server's own processes above one."""
    depth = 0
    while "multiprocessing.forkserver" in lines.get(pid := parents.get(pid, 0), ""):
        depth += 1
    return depth


def _world(pid: int) -> str:
    """Return the folder of a host's observations, by the file that it opens for its stacks."""
    folder = _PROC / str(pid) / "fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                file = Path(os.readlink(folder / name))
                if file.suffix == ".stacks":
                    return str(file.parent)
    return ""
