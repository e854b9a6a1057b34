"""The agent of one rank: a launched process that starts and watches the rank's hosts, on commands of process 0.

A rank runs in a host below the agent, so a failure of the rank does not end the launched process. The agent does not
unpickle jobs: only hosts run engine and model.
"""

from __future__ import annotations

import base64
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from shardproof.harness.errors import HarnessBug
from shardproof.harness.worlds.launched.agent_link import Command
from shardproof.harness.worlds.launched.cluster import meet_supervisor, releases
from shardproof.harness.worlds.launched.launcher import LaunchedProcess
from shardproof.harness.worlds.messages import FilePiece, Hello, HostSpec, HostState, send
from shardproof.harness.worlds.processes.forkserver import draw_hash_seeds, server_of, warm_up
from shardproof.harness.worlds.processes.host_handle import HostHandle
from shardproof.harness.worlds.processes.leaked_processes import LeakedProcesses

_PIECE_BYTES = 3 * 2**15  # in base64 short enough that messages do not cut it


def serve(process: LaunchedProcess) -> int:
    """Run as the agent of a rank until process 0 dismisses it; returns the exit code."""
    connection, token = meet_supervisor(process)
    with tempfile.TemporaryDirectory(prefix="shardproof-") as folder:
        return _Agent(process, connection, token, Path(folder)).serve()


class _Agent:
    """Obeys commands, and reports the state of its host whenever it changes."""

    def __init__(self, process: LaunchedProcess, connection: Connection, token: str, folder: Path) -> None:
        self._process = process
        self._connection = connection
        self._token = token
        self._folder = folder
        self._host: HostHandle | None = None
        self._leaked = LeakedProcesses(())
        self._job_folder = folder
        self._state = HostState(answered=0)
        self._is_over = False

    def serve(self) -> int:
        """Obey until the command to leave; returns 1 if the supervisor ends without one."""
        while not self._is_over:
            host = self._host
            ready = wait([self._connection, *(host.awaited if host else ())])
            try:
                if self._connection in ready:
                    self._obey(self._connection.recv())
                if self._host is not None:
                    self._host.listen()
                self._report()
            except (EOFError, OSError) as error:
                why = f"cannot be reached: {error}" if isinstance(error, TimeoutError) else "has ended"
                print(f"rank {self._process.rank}: process 0 {why}", file=sys.stderr)
                return 1
        return 0

    def _obey(self, command: Command) -> None:
        error = ""
        try:
            getattr(self, command.method)(*command.args)
        except (HarnessBug, OSError) as failure:
            error = str(failure)
        self._state = replace(self._state, answered=command.number, error=error)
        self._report(is_answer=True)

    def _report(self, *, is_answer: bool = False) -> None:
        host, before = self._host, self._state
        if host is not None:
            self._state = replace(
                before,
                is_ready=host.is_ready,
                has_left=host.has_left,
                is_over=host.is_over,
                outcome=host.outcomes.get(self._process.rank),
            )
        if is_answer or self._state != before:
            send(self._connection, self._state)

    def greet(self) -> None:
        """Introduce itself."""
        process = self._process
        send(
            self._connection,
            Hello(
                token=self._token,
                rank=process.rank,
                host=socket.gethostname(),
                local_rank=process.local_rank,
                node=process.node,
                releases=releases(),
                folder=str(self._folder),
                clock_s=time.monotonic(),
            ),
        )

    def warm(self, seed: int) -> None:
        """Start the fork server, with the hash seed that the rank has in other worlds of processes."""
        draw_hash_seeds(seed, first=server_of(self._process.rank))
        warm_up()

    def start(self, spec: HostSpec, path: Iterable[str]) -> None:
        """Start a host; it finds modules on the supervisor's path."""
        sys.path += [folder for folder in path if folder not in sys.path]
        shutil.rmtree(spec.folder, ignore_errors=True)  # left by a world that could not start
        spec.folder.mkdir()
        self._state = HostState(answered=self._state.answered)
        self._host = HostHandle(spec)
        self._leaked = LeakedProcesses([self._host])

    def begin(self, job: bytes, folder: Path) -> None:
        """Pass a job on."""
        folder.mkdir()
        self._job_folder = folder
        self._known.begin(job)

    def dismiss(self) -> None:
        """Ask the host to leave, or let it end."""
        self._known.dismiss()

    def check_server(self) -> None:
        """Raise HarnessBug if the fork server does not report an end."""
        self._known.check_server()

    def ask_for_stacks(self) -> None:
        """Make the host write its stacks."""
        self._known.ask_for_stacks()

    def await_stacks(self, limit_s: float) -> None:
        """Read the stack of the rank as soon as it is written."""
        self._known.await_stacks(time.monotonic() + limit_s)
        self._state = replace(self._state, stack=self._known.stack(self._process.rank))

    def miss_the_end(self, limit_s: float) -> None:
        """Record why the host does not end."""
        self._known.miss_the_end(time.monotonic() + limit_s)

    def look(self) -> None:
        """Record the processes below the host."""
        if not self._known.is_over:
            self._leaked.look(self._known)

    def kill(self) -> None:
        """End the host itself."""
        self._known.kill()
        self._known.listen()

    def end_leaked(self) -> None:
        self._state = replace(self._state, leaks=self._leaked.end())

    def send_files(self) -> None:
        """Send the rank's files of its last job."""
        self._send(self._job_folder, "rank")

    def release(self) -> None:
        """Send the output of the host, and drop it."""
        host, self._host = self._host, None
        if host is not None:
            host.release()
            self._send(host.spec.folder, "host")
            shutil.rmtree(host.spec.folder, ignore_errors=True)
        self._state = HostState(answered=self._state.answered)

    def leave(self) -> None:
        """End."""
        self._is_over = True

    @property
    def _known(self) -> HostHandle:
        if self._host is None:
            raise HarnessBug(
                f"the agent of rank {self._process.rank}",
                expected="a host",
                got="none",
                hint="the messages above",
            )
        return self._host

    def _send(self, folder: Path, kind: str) -> None:
        for path in sorted(folder.glob(f"{kind}{self._process.rank}.*")):
            with path.open("rb") as file:
                start = 0
                while (data := file.read(_PIECE_BYTES)) or not start:
                    piece = FilePiece(name=path.name, start=start, data=base64.b64encode(data).decode())
                    send(self._connection, piece)
                    start += len(data)
                    if not data:
                        break
