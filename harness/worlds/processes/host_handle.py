"""The supervisor's side of one host process: starts it, receives its messages, ends it, and determines how it ended."""

from __future__ import annotations

import contextlib
import signal
import time
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import ForkingPickler

from shardproof.harness.errors import HarnessBug
from shardproof.harness.worlds.messages import (
    Done,
    Dying,
    Finished,
    Garbled,
    HostSpec,
    Inbox,
    Job,
    LastThread,
    Leaving,
    Ready,
    Started,
)
from shardproof.harness.worlds.outcome import Abandoned, Died, Outcome, Raised, Returned, TimedOut
from shardproof.harness.worlds.output import drop_empty, printed
from shardproof.harness.worlds.processes.forkserver import (
    REPORT_LIMIT_S,
    STATUS_WITHOUT_SERVER,
    end,
    end_server,
    forkserver_context,
    kill,
    server_of,
    started,
)
from shardproof.harness.worlds.processes.host_process import host_main
from shardproof.harness.worlds.processes.lineage import can_adopt, command, has_ended, parent_of, signalled
from shardproof.harness.worlds.processes.stacks import crashed_thread, stack_of
from shardproof.harness.worlds.spec import WorldKind


class HostHandle:
    """One host process as its supervisor sees it."""

    def __init__(self, spec: HostSpec) -> None:
        self.spec = spec
        self.outcomes: dict[int, Outcome] = {}
        self.is_ready = False
        self.has_left = False
        self.is_over = False
        self._is_deaf = False
        self._idents: dict[int, int] = {}
        self._leaving: Leaving | None = None
        self._dying: Dying | None = None
        ours, theirs = forkserver_context().Pipe()
        self.connection: Connection = ours
        self._inbox = Inbox(ours)
        try:
            self._process: ForkServerProcess = started(
                host_main, theirs, spec, limit_s=spec.world.deadline_s, server=self._server_number
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid or 0
        self._server = parent_of(self.pid)

    @property
    def _server_number(self) -> int:
        """Return the host's fork server; see [Note: a server per rank]. An agent has one server, for its rank."""
        world = self.spec.world
        return server_of(self.spec.ranks[0] if world.kind is WorldKind.PROCESSES else 0, world.preload)

    @property
    def awaited(self) -> list[Connection | int]:
        """File objects that are readable as soon as the host sends a message or has ended.

        The end has a file descriptor of its own: a child of a rank may hold the connection open.
        """
        if self.is_over:
            return []
        return [self._process.sentinel] if self._is_deaf else [self._process.sentinel, self.connection]

    @property
    def pending(self) -> list[int]:
        """Ranks of this host that have not ended."""
        return [rank for rank in self.spec.ranks if rank not in self.outcomes]

    @property
    def ended_by_itself(self) -> bool:
        """Return whether the harness stopped no rank; processes below a rank while it runs are no leak."""
        return self.is_over or not any(isinstance(o, Abandoned | TimedOut) for o in self.outcomes.values())

    def check_start(self) -> None:
        """Raise HarnessBug unless the process can take a job."""
        if self.is_ready:
            return
        nothing = f"nothing within the deadline of {self.spec.world.deadline_s:g} s"
        got = f"its end, exit code {self._process.exitcode}" if self.is_over else nothing
        raise HarnessBug(
            f"world {self.spec.world}",
            expected=f"the host of ranks {self.spec.ranks} to start",
            got=got,
            hint=f"`shardproof doctor`, and what was printed: {printed(self.spec.folder) or 'nothing'}",
        )

    def check_server(self) -> None:
        """Raise HarnessBug if the process has ended and the fork server does not report it."""
        if self.is_over or not can_adopt() or not has_ended(self.pid):
            return
        self._process.join(REPORT_LIMIT_S)
        if self._process.exitcode is None:
            end_server(self._server_number)
            raise HarnessBug(
                f"world {self.spec.world}",
                expected=f"the fork server to report the end of the host of ranks {self.spec.ranks}",
                got="nothing: the server is stopped or hangs",
                hint="the case again; the next one has a new server",
            )

    def begin(self, job: Job | bytes) -> None:
        """Send the next job, pickled or not; the ranks are pending again.

        If their process has ended since it was ready, they are dead.
        """
        self.outcomes.clear()
        self._send(job if isinstance(job, bytes) else pickled(job))
        if self.is_over:
            self._bury()

    def dismiss(self) -> None:
        """Ask the process to leave, and once it has left, let it end."""
        self._send(pickled(None))

    def listen(self) -> None:
        """Receive all messages of the host, and its end."""
        is_over = not self._process.is_alive()  # first, so that earlier messages are included
        try:
            while not self._is_deaf and self.connection.poll():
                for message in self._inbox.read():
                    if not self._is_deaf:
                        self._take(message)
        except (EOFError, OSError):
            self._is_deaf = True
        if is_over and not self.is_over:
            self.is_over = True
            self._bury()

    def stack(self, rank: int) -> str:
        """Return the stack of a rank that is still alive, innermost frame first."""
        return self._stack_of(self._idents.get(rank, 0))

    def ask_for_stacks(self) -> None:
        """Make the process write the stacks of all its threads."""
        signalled(self.pid, signal.SIGUSR1)

    def await_stacks(self, limit: float) -> None:
        """Wait until the stacks of all pending ranks are on disk, at the latest until ``limit`` (time.monotonic)."""
        while time.monotonic() < limit and not all(self.stack(rank) for rank in self.pending):
            self._process.join(0.01)

    def miss_the_end(self, limit: float) -> None:
        """Record why a process does not end after its results; waits for its stacks until ``limit``."""
        main = self._leaving.ident if self._leaving else self._idents.get(self.spec.ranks[0], 0)
        self.ask_for_stacks()
        while time.monotonic() < limit and not self._stack_of(main):  # written last
            self._process.join(0.01)
        for rank, thread in self._held_up_by().items():
            self.outcomes[rank] = TimedOut(
                rank=rank,
                stack=self._stack_of(thread.ident if thread else main),
                last_call="",
                is_after_result=True,
                thread=thread.name if thread else "",
                is_attributed=len(self.spec.ranks) == 1 or (thread is not None and thread.rank is not None),
            )

    def kill(self) -> None:
        """End the process itself; `LeakedProcesses` ends the processes that it started."""
        kill(self._process)

    def release(self) -> None:
        """Close pipes and process handles."""
        drop_empty(self.spec.output_file)
        self.connection.close()
        end(self._process)

    def _send(self, pickled_job: bytes) -> None:
        with contextlib.suppress(OSError):  # the sentinel reports a host that is already gone
            self.connection.send_bytes(pickled_job)

    def _stack_of(self, ident: int) -> str:
        return stack_of(self.spec.stack_file, ident)

    def _take(self, message: object) -> None:
        match message:
            case Ready():
                self.is_ready = True
            case Finished(outcome=outcome) if outcome.rank in self.spec.ranks:
                self.outcomes[outcome.rank] = outcome
            case Started(rank=rank, thread_ident=ident) if rank in self.spec.ranks:
                self._idents[rank] = ident
            case Dying(rank=rank) if rank in self.spec.ranks:
                self._dying = message
            case Leaving():
                self._leaving = message
            case Done():
                self.has_left = True
            case _:
                self._is_deaf = True  # later messages are not trusted
                text = message.text if isinstance(message, Garbled) else f"{message!r:.80}"
                for rank in self.spec.ranks:
                    if isinstance(self.outcomes.get(rank), Returned | None):
                        self.outcomes[rank] = _garbled(rank, text)

    def _bury(self) -> None:
        """Turn the end of the process into an outcome of each rank that had not ended, or ended badly with it."""
        exit_code = self._exit_code()
        is_clean_end = self.has_left and exit_code == 0
        culprit, text = self._culprit(crashed_thread(self.spec.stack_file))
        for rank in self.spec.ranks:
            outcome = self.outcomes.get(rank)
            is_innocent = culprit is not None and culprit != rank
            if outcome is None and is_innocent:
                self.outcomes[rank] = Abandoned(rank=rank)
            elif outcome is None or (isinstance(outcome, Returned) and not is_clean_end and not is_innocent):
                self.outcomes[rank] = Died(
                    rank=rank,
                    exit_code=exit_code,
                    is_attributed=culprit is not None,
                    text=text,
                    is_after_result=outcome is not None,
                )

    def _exit_code(self) -> int:
        """Return the exit code; the reaper kills a process that has lost its fork server."""
        is_unknown = self._process.exitcode is None or self._has_lost_its_server
        return -signal.SIGKILL if is_unknown else int(self._process.exitcode or 0)

    @property
    def _has_lost_its_server(self) -> bool:
        # In a process that ends, the command line disappears first, before its pipes close.
        is_status = self._process.exitcode == STATUS_WITHOUT_SERVER
        return is_status and self._server is not None and not command(self._server)

    def _culprit(self, crash: tuple[int, str] | None) -> tuple[int | None, str]:
        if self._has_lost_its_server:
            return None, "the fork server was killed"
        if self._dying is not None:
            return self._dying.rank, f"it called {self._dying.call}"
        stack = crash[1] if crash else ""
        if len(self.spec.ranks) == 1:
            return self.spec.ranks[0], stack
        ranks = {ident: rank for rank, ident in self._idents.items()}
        return (ranks.get(crash[0]) if crash else None), stack

    def _held_up_by(self) -> dict[int, LastThread | None]:
        """Map the ranks whose process does not end to the thread for which it waits; all ranks if none is known."""
        threads = self._leaving.threads if self._leaving else ()
        late = [thread for thread in threads if self._stack_of(thread.ident)]
        owned: dict[int, LastThread | None] = {t.rank: t for t in late if t.rank is not None}
        return owned or dict.fromkeys(self.spec.ranks, late[0] if late else None)


def pickled(job: Job | None) -> bytes:
    """Return a job in the form in which a host receives it."""
    return bytes(ForkingPickler.dumps(job))


def _garbled(rank: int, text: str) -> Raised:
    """Blame the rank: a host itself sends only valid messages."""
    return Raised(
        rank=rank,
        kind="GarbledMessage",
        message=f"its process sent what is no message of its own: {text}",
        traceback="",
        is_symptom=False,
        at_s=time.monotonic(),
    )
