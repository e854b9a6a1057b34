"""Running one body on every rank of a world, and accounting for every rank. Nothing here knows engines."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from harness.errors import UsageError
from harness.ledger.journal import read_journal
from harness.worlds.message import HostSpec, Job
from harness.worlds.outcome import Abandoned, Died, Outcome, Raised, Returned, TimedOut, WorldResult
from harness.worlds.rank import journal_path
from harness.worlds.spec import WorldKind, WorldSpec
from harness.worlds.supervisor import Host

__all__ = ["World", "WorldPool", "launch"]

# How long others may take to report once one rank has failed for a reason of its own: long enough for ranks that
# fail in the same instant, or that the failure wakes, to be accounted for by name.
_GRACE_S = 0.3
# For all processes of a world together: faulthandler answers a signal in milliseconds, even while Python code is
# stuck; a process that is stopped or cannot be scheduled does not answer, and must not hold up the verdict.
_STACKS_LIMIT_S = 0.5


def launch(spec: WorldSpec, body: Callable[..., Any], *args: Any, folder: Path) -> WorldResult:
    """Run ``body(context, *args)`` on every rank of a fresh world; returns one outcome per rank, never raises for them.

    ``body`` is a module-level function; ``args`` and results are picklable. ``folder`` is an empty or new folder
    that receives the ranks' journals and whatever the body writes. The verdict is there within the world's
    deadline and two seconds; no process of the world outlives the call.
    """
    world = World(spec, folder)
    try:
        result = world.run(body, *args, folder=folder)
    finally:
        leaks = world.close()
    return WorldResult(outcomes=result.outcomes, leaks=(*result.leaks, *leaks))


class World:
    """The processes of one world, alive between jobs until closed or until a job fails."""

    def __init__(self, spec: WorldSpec, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.spec = spec
        ranks = tuple(range(spec.size))
        shares = [ranks] if spec.kind is WorldKind.THREADS else [(rank,) for rank in ranks]
        self._hosts: list[Host] = []
        self.is_usable = True
        try:
            for share in shares:
                self._hosts.append(Host(HostSpec(world=spec, ranks=share, folder=folder)))
            for host in self._hosts:
                host.await_ready()
        except BaseException:
            self._kill()
            raise

    def run(self, body: Callable[..., Any], *args: Any, folder: Path, seed: int | None = None) -> WorldResult:
        """Run one job on every rank; after a result that is not clean the world is over.

        ``seed`` is of the schedule, where ranks are threads; None for that of the world's spec.
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
            self._listen_until(deadline)
            outcomes = self._account(folder)
        except BaseException:
            self._kill()
            raise
        result = WorldResult(outcomes=tuple(outcomes[rank] for rank in range(self.spec.size)))
        if not result.is_clean:
            return WorldResult(outcomes=result.outcomes, leaks=tuple(self._kill()))
        return result

    def close(self) -> tuple[str, ...]:
        """End the world; returns what its ranks had left behind."""
        leaks = [leak for host in self._hosts for leak in host.close()] if self.is_usable else []
        self._release()
        return tuple(leaks)

    def _listen_until(self, deadline: float) -> None:
        stop_at = deadline
        while self._pending and (left := stop_at - time.monotonic()) > 0:
            live = [host for host in self._hosts if host.pending]
            wait([host.connection for host in live], timeout=left)
            for host in live:
                host.listen()
            if any(_is_cause(o) for host in self._hosts for o in host.outcomes.values()):
                stop_at = min(stop_at, time.monotonic() + _GRACE_S) if stop_at == deadline else stop_at

    @property
    def _pending(self) -> list[int]:
        return [rank for host in self._hosts for rank in host.pending]

    def _account(self, folder: Path) -> dict[int, Outcome]:
        """Give every rank its outcome: those still pending are abandoned if there is a cause, else timed out."""
        outcomes = {rank: o for host in self._hosts for rank, o in host.outcomes.items()}
        if not self._pending:
            return outcomes
        has_cause = any(_is_cause(o) for o in outcomes.values())
        for rank, stack in self._stacks().items():
            outcomes[rank] = (
                Abandoned(rank=rank, stack=stack)
                if has_cause
                else TimedOut(rank=rank, stack=stack, last_call=_last_call(folder, rank))
            )
        return outcomes

    def _stacks(self) -> dict[int, str]:
        """Give the stacks of all pending ranks, empty for those that do not answer in time."""
        late = [host for host in self._hosts if host.pending]
        for host in late:
            host.ask_for_stacks()
        limit = time.monotonic() + _STACKS_LIMIT_S
        for host in late:
            host.await_stacks(limit)
        return {rank: host.stack(rank) for host in late for rank in host.pending}

    def _kill(self) -> list[str]:
        self.is_usable = False
        return [leak for host in self._hosts for leak in host.kill()]

    def _release(self) -> None:
        self.is_usable = False
        for host in self._hosts:
            host.release()
        self._hosts.clear()


class WorldPool:
    """Keeps one world per spec between jobs, where starting one is dear; a failure retires it."""

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
        """End all worlds."""
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()


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
