"""Runs one body on every rank of a world, and accounts for every rank. Independent of engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from zlib import crc32

from shardproof.harness.errors import LostHostError, UsageError
from shardproof.harness.torch_compat.accelerators import require_device
from shardproof.harness.torch_compat.process_groups import TCPStore
from shardproof.harness.tracing.journal import read_journal
from shardproof.harness.worlds.launched.cluster import Cluster, cluster
from shardproof.harness.worlds.launched.launcher import rank_environment
from shardproof.harness.worlds.launched.remote_host import RemoteHost
from shardproof.harness.worlds.machine import require_loopback
from shardproof.harness.worlds.messages import HostSpec, Job
from shardproof.harness.worlds.outcome import (
    Abandoned,
    Died,
    Ending,
    Outcome,
    Raised,
    Returned,
    TimedOut,
    WorldResult,
)
from shardproof.harness.worlds.processes.host_handle import HostHandle
from shardproof.harness.worlds.processes.leaked_processes import LeakedProcesses
from shardproof.harness.worlds.processes.left_files import LeftFiles
from shardproof.harness.worlds.rank import journal_path
from shardproof.harness.worlds.spec import WorldKind, WorldSpec

# How long other ranks may take to report after one rank failed for a reason of its own: long enough to account by name
# for ranks that fail in the same instant, or that the failure wakes.
_GRACE_S = 0.3
# How long processes may take to leave after their last result, and never longer than the world's deadline. A rank that
# leaves correctly needs milliseconds, and one that never ends should not cost another full deadline.
_LEAVE_LIMIT_S = 10.0
# For all processes of a world together. faulthandler answers a signal in milliseconds, even while Python code is stuck.
# A process that is stopped or cannot be scheduled does not answer, and must not delay the verdict.
_STACKS_LIMIT_S = 0.5


def launch(spec: WorldSpec, body: Callable[..., Any], *args: Any, folder: Path) -> WorldResult:
    """Run ``body(context, *args)`` on every rank of a fresh world; returns one outcome per rank, never raises for them.

    ``body`` is a module-level function; ``args`` and results are picklable. ``folder`` is an empty or new folder that
    receives the ranks' journals and all files of the body. The call returns within the world's deadline plus two
    seconds, or plus twelve if processes do not end after their results. No process that the world started outlives the
    call.
    """
    world = World(spec, folder)
    try:
        result = world.run(body, *args, folder=folder)
    finally:
        ending = world.close()
    return result.ended_by(ending)


Host = HostHandle | RemoteHost


class World:
    """The processes of one world, alive between jobs until closed or until a job fails."""

    def __init__(self, spec: WorldSpec, folder: Path) -> None:
        require_device(spec.device, spec.num_local_processes)
        if spec.kind is WorldKind.PROCESSES:
            require_loopback()
        folder.mkdir(parents=True, exist_ok=True)
        self.spec = spec
        shares = [spec.ranks] if spec.kind.shares_a_process else [(rank,) for rank in spec.ranks]
        self._cluster = _cluster_for(spec) if spec.kind is WorldKind.LAUNCHED else None
        # As in a launcher's job, one process serves the store for all ranks of one world.
        self._store = (
            TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if self._cluster else None
        )
        self._hosts: list[Host] = []
        self._leaked = LeakedProcesses(())
        self._left = None if self._cluster else LeftFiles(folder)
        self.is_usable = True
        try:
            for share in shares:
                self._hosts.append(self._start(share, folder))
            self._leaked = LeakedProcesses([host for host in self._hosts if isinstance(host, HostHandle)])
            self._await_ready()
        except BaseException:
            self._kill()
            self._release()
            raise

    def run(self, body: Callable[..., Any], *args: Any, folder: Path, seed: int | None = None) -> WorldResult:
        """Run one job on every rank; after a result that is not clean the world is over.

        ``seed`` is the schedule's, where ranks are threads; None for the seed of the world's spec.
        """
        if body.__module__ == "__main__":
            raise UsageError(
                f"rank body {body.__qualname__}",
                expected="a function of an importable module",
                got="one of the script that is being run",
                hint="moving it to a module of its own and importing it from there",
            )
        folder.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + self.spec.deadline_s
        job = Job(body=body, args=args, folder=folder, seed=self.spec.seed if seed is None else seed)
        for host in self._hosts:
            host.begin(job)
        try:
            self._listen_while(lambda host: bool(host.pending), deadline)
            self._check_servers(host for host in self._hosts if host.pending)
            if not self._pending and not self._has_cause and self._has_symptom:
                # A rank may have died after its result: its end is seen a moment later than the errors of the others.
                self._listen_while(lambda _: True, time.monotonic() + _GRACE_S)
            outcomes = self._account(folder)
        except BaseException:
            self._kill()
            raise
        result = WorldResult(outcomes=tuple(outcomes[rank] for rank in self.spec.ranks))
        if not result.is_clean:
            return WorldResult(outcomes=result.outcomes, leaks=self._kill())
        return result

    def close(self) -> Ending:
        """End the world; returns the ranks that ended badly after their results, and the leaked processes."""
        try:
            return self._leave() if self.is_usable else Ending()
        except BaseException:
            self._kill()
            raise
        finally:
            self._release()

    def _start(self, ranks: tuple[int, ...], folder: Path) -> Host:
        found, size = self._cluster, self.spec.size
        if found is None:
            given = rank_environment(
                ranks[0], size, local_rank=ranks[0], local_size=size, address="127.0.0.1"
            )
        else:
            given = found.environment(ranks[0], size)
        # No process listens on the port unless an engine does. It is the same on all ranks of a world, and another in
        # the next.
        port = 20_000 + crc32(str(folder).encode()) % 10_000
        host = HostSpec(
            world=self.spec,
            ranks=ranks,
            folder=folder,
            environment={**given, "MASTER_PORT": str(port)},
            temporary=self._left.environment if self._left else {},
            store=self._store.port if self._store else None,
        )
        return HostHandle(host) if found is None or ranks == (0,) else RemoteHost(host, found.links[ranks[0]])

    def _await_ready(self) -> None:
        """Wait until all processes can take a job; they are forks of a warm server, so a deadline is ample."""
        self._listen_while(lambda host: not host.is_ready, time.monotonic() + self.spec.deadline_s)
        for host in self._hosts:
            host.check_start()

    def _leave(self) -> Ending:
        """Let all processes leave by themselves, and end those that do not; see [Note: leaving]."""
        for host in self._hosts:
            host.dismiss()
        limit_s = min(_LEAVE_LIMIT_S, self.spec.deadline_s)
        self._listen_while(lambda host: not host.has_left, time.monotonic() + limit_s)
        late = [host for host in self._hosts if not host.has_left and not host.is_over]
        for host in self._hosts:
            if host.has_left:
                self._look(host)
                host.dismiss()
        self._listen_while(lambda host: host.has_left, time.monotonic() + limit_s)
        self._check_servers(host for host in self._hosts if host.has_left)
        if not self._has_cause:
            for host in late or [host for host in self._hosts if not host.is_over]:
                host.miss_the_end(time.monotonic() + _STACKS_LIMIT_S)
        leaks = self._kill()
        return Ending(outcomes=self._outcomes(), leaks=leaks)

    def _check_servers(self, hosts: Iterable[Host]) -> None:
        for host in hosts:
            host.check_server()

    def _listen_while(self, is_awaited: Callable[[Host], bool], limit: float) -> None:
        """Listen to the hosts until every awaited one is over; sooner if one fails for a reason of its own."""
        stop_at = limit
        while (left := stop_at - time.monotonic()) > 0 and any(
            is_awaited(host) and not host.is_over for host in self._hosts
        ):
            ready = set(wait([item for host in self._hosts for item in host.awaited], timeout=left))
            for host in self._hosts:
                if not ready.isdisjoint(host.awaited):
                    host.listen()
            if stop_at == limit and self._has_cause:
                stop_at = min(stop_at, time.monotonic() + _GRACE_S)

    @property
    def _has_cause(self) -> bool:
        return any(_is_cause(o) for host in self._hosts for o in host.outcomes.values())

    @property
    def _has_symptom(self) -> bool:
        return any(
            isinstance(o, Raised) and o.is_symptom for host in self._hosts for o in host.outcomes.values()
        )

    @property
    def _pending(self) -> list[int]:
        return [rank for host in self._hosts for rank in host.pending]

    def _account(self, folder: Path) -> dict[int, Outcome]:
        """Return every rank's outcome: pending ranks are abandoned if there is a cause, else timed out."""
        for host in self._hosts:
            if isinstance(host, RemoteHost):
                host.gather(folder)
        outcomes = self._outcomes()
        if not self._pending:
            return outcomes
        for rank, stack in self._stacks().items():
            found = (
                Abandoned(rank=rank, stack=stack)
                if self._has_cause
                else TimedOut(rank=rank, stack=stack, last_call=_last_call(folder, rank))
            )
            outcomes[rank] = self._located(found)
        return outcomes

    def _outcomes(self) -> dict[int, Outcome]:
        return {rank: self._located(o) for host in self._hosts for rank, o in host.outcomes.items()}

    def _located(self, outcome: Outcome) -> Outcome:
        """Add the machine of a rank that did not end well, in a world that may have several."""
        if self._cluster is None or isinstance(outcome, Returned):
            return outcome
        return replace(outcome, host=self._cluster.host(outcome.rank))

    def _stacks(self) -> dict[int, str]:
        """Return the stacks of all pending ranks, empty for ranks that do not answer in time."""
        late = [host for host in self._hosts if host.pending]
        for host in late:
            host.ask_for_stacks()
        limit = time.monotonic() + _STACKS_LIMIT_S
        for host in late:
            host.await_stacks(limit)
        return {rank: host.stack(rank) for host in late for rank in host.pending}

    def _kill(self) -> tuple[str, ...]:
        """End all processes; returns the leaks of ranks that ended by themselves."""
        self.is_usable = False
        for host in self._hosts:
            if not host.is_over:
                self._look(host)
            host.kill()
        far = [host for host in self._hosts if isinstance(host, RemoteHost)]
        return (*self._leaked.end(), *(leak for host in far for leak in host.end_leaked()))

    def _look(self, host: Host) -> None:
        """Record the processes below a host that is still alive."""
        if isinstance(host, RemoteHost):
            host.look()
        else:
            self._leaked.look(host)

    def _release(self) -> None:
        self.is_usable = False
        for host in self._hosts:
            host.release()
        self._hosts.clear()
        if self._left is not None:
            self._left.close()


class WorldPool:
    """Keeps one world per spec between jobs, because starting one is expensive; a failure retires it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._worlds: dict[WorldSpec, World] = {}
        self._num_started = 0

    def run(self, spec: WorldSpec, body: Callable[..., Any], *args: Any, folder: Path) -> WorldResult:
        """Run a job in the pooled world of ``spec``, starting one if there is none."""
        world = self._worlds.get(spec)
        if world is None:
            self._num_started += 1
            world = World(spec, self._folder / f"world{self._num_started}")
            self._worlds[spec] = world
        result = world.run(body, *args, folder=folder)
        if not world.is_usable:
            self._worlds.pop(spec).close()
        return result

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()


def _cluster_for(spec: WorldSpec) -> Cluster:
    """Return the cluster in which a launched world can live; raises UsageError or LostHostError if there is none."""
    found = cluster()
    if found is None or spec.size > found.process.size:
        raise UsageError(
            f"world {spec}",
            expected=f"a launcher that started {spec.size} processes",
            got=f"one that started {found.process.size}" if found else "a session that none started",
            hint=f"torchrun --nproc-per-node {spec.size} -m shardproof run ... --world launched",
        )
    if found.lost:
        raise LostHostError(
            f"world {spec}",
            expected="all processes of the launcher",
            got=found.lost,
            hint="the launcher's log, and --resume",
        )
    found.await_warm()
    return found


def _is_cause(outcome: Outcome) -> bool:
    match outcome:
        case Died():
            return True
        case Raised(is_symptom=is_symptom):
            return not is_symptom
        case Returned() | TimedOut() | Abandoned():
            return False


def _last_call(folder: Path, rank: int) -> str:
    ledger = read_journal(journal_path(folder, rank)).ledger
    return ledger[-1].describe() if ledger else "no collective yet"
