"""The supervisor's side of one host process: start it, hear from it, end it, and know how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

from harness.errors import HarnessBug
from harness.worlds.forkserver import forkserver_context, started
from harness.worlds.host import host_main
from harness.worlds.message import Dying, Finished, Garbled, HostSpec, Inbox, Job, Ready, Started
from harness.worlds.outcome import Abandoned, Died, Outcome, Raised
from harness.worlds.stacks import crashed_thread, stack_of

__all__ = ["Host"]

_START_LIMIT_S = 120.0  # a cold fork server imports torch first, which a loaded machine can make very slow
_END_LIMIT_S = 5.0  # SIGKILL needs no cooperation; this only bounds a wait that should be instant


class Host:
    """One host process as its supervisor sees it."""

    def __init__(self, spec: HostSpec) -> None:
        self.spec = spec
        self.outcomes: dict[int, Outcome] = {}
        self._idents: dict[int, int] = {}
        self._dying: Dying | None = None
        ours, theirs = forkserver_context().Pipe()
        self.connection: Connection = ours
        self._inbox = Inbox(ours)
        self._process: ForkServerProcess = started(host_main, theirs, spec)
        self._pid = self._process.pid or 0
        theirs.close()

    @property
    def sentinel(self) -> int:
        """A file descriptor that is readable once the process has ended."""
        return self._process.sentinel

    @property
    def pending(self) -> list[int]:
        """Ranks of this host that have not ended."""
        return [rank for rank in self.spec.ranks if rank not in self.outcomes]

    def await_ready(self) -> None:
        """Wait until the process has done its imports, so that they do not count against the deadline."""
        try:
            if self.connection.poll(_START_LIMIT_S) and Ready() in self._inbox.read():
                return
            got = f"nothing for {_START_LIMIT_S:.0f} s"
        except EOFError:
            self._process.join(_END_LIMIT_S)
            got = f"its end, exit code {self._process.exitcode}"
        raise HarnessBug(
            f"world {self.spec.world}",
            expected=f"the host of ranks {self.spec.ranks} to start",
            got=got,
            hint="`shardproof doctor`, and the messages above",
        )

    def begin(self, job: Job) -> None:
        """Send the next job; the ranks are pending again."""
        self.outcomes.clear()
        with contextlib.suppress(OSError):  # a host that is already gone shows at its sentinel
            self.connection.send(job)

    def listen(self) -> None:
        """Take in everything the host has said, and its end."""
        try:
            while self.connection.poll():
                for message in self._inbox.read():
                    self._take(message)
        except (EOFError, OSError):
            self._process.join(_END_LIMIT_S)
            self._bury()

    def stack(self, rank: int) -> str:
        """Give the stack of a rank that is still alive, innermost frame first."""
        return stack_of(self.spec.stack_file, self._idents.get(rank, 0))

    def ask_for_stacks(self) -> None:
        """Have the process write the stacks of all its threads."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGUSR1)

    def await_stacks(self, limit: float) -> None:
        """Wait until the stacks of all pending ranks are on disk, at the latest until ``limit`` (time.monotonic)."""
        while time.monotonic() < limit and not all(self.stack(rank) for rank in self.pending):
            self._process.join(0.01)

    def kill(self) -> list[str]:
        """End the process and everything it started; returns what was still there beside it."""
        self._signal_group()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.join(_END_LIMIT_S)
        return self._leftovers()

    def close(self) -> list[str]:
        """Let the process end by itself, then end whatever it left behind."""
        with contextlib.suppress(OSError):
            self.connection.send(None)
        self._process.join(_END_LIMIT_S)
        leftovers = self._leftovers()
        if self._process.is_alive():
            self.kill()
        return leftovers

    def release(self) -> None:
        """Give back pipes and process handles."""
        self.connection.close()
        self._process.close()

    def _take(self, message: object) -> None:
        match message:
            case Finished(outcome=outcome):
                self.outcomes[outcome.rank] = outcome
            case Started(rank=rank, thread_ident=ident):
                self._idents[rank] = ident
            case Dying():
                self._dying = message
            case Garbled(text=text):
                for rank in self.pending:
                    self.outcomes[rank] = _garbled(rank, text)

    def _bury(self) -> None:
        """Turn the end of the process into an outcome of each rank that had not ended."""
        exit_code = -signal.SIGKILL if self._process.exitcode is None else self._process.exitcode
        crash = crashed_thread(self.spec.stack_file)
        culprit, text = self._culprit(crash)
        for rank in self.pending:
            is_innocent = culprit is not None and culprit != rank
            self.outcomes[rank] = (
                Abandoned(rank=rank)
                if is_innocent
                else Died(rank=rank, exit_code=exit_code, is_attributed=culprit is not None, text=text)
            )

    def _culprit(self, crash: tuple[int, str] | None) -> tuple[int | None, str]:
        if self._dying is not None:
            return self._dying.rank, f"it called {self._dying.call}"
        stack = crash[1] if crash else ""
        if len(self.spec.ranks) == 1:
            return self.spec.ranks[0], stack
        ranks = {ident: rank for rank, ident in self._idents.items()}
        return (ranks.get(crash[0]) if crash else None), stack

    def _signal_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)

    def _leftovers(self) -> list[str]:
        """End what remains of the process group once its leader is gone, and say so."""
        if self._process.is_alive():
            return []
        try:
            os.killpg(self._pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return []
        return [f"rank(s) {list(self.spec.ranks)} left processes behind in process group {self._pid}"]


def _garbled(rank: int, text: str) -> Raised:
    """Blame the rank: no host sends bytes that are no message."""
    return Raised(
        rank=rank,
        kind="GarbledMessage",
        message=f"its process sent what is no message: {text}",
        traceback="",
        is_symptom=False,
        at_s=time.monotonic(),
    )
