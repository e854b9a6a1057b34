"""Deadlock detection: which rank is blocked on which operation. Handles ranks and threads, not collectives.

[Note: deadlock] Ranks are deadlocked when each of them has returned or is blocked: no rank is left that could satisfy
any of the waits. That is no timeout: a rank that computes is not blocked, and its asynchronous calls have already
arrived. A rank is blocked when its own thread is, together with every other thread through which it ever communicated.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from shardproof.harness.errors import DeadlockError
from shardproof.harness.tracing.collectives.call import Call
from shardproof.harness.tracing.current_rank import is_home_thread
from shardproof.harness.worlds.threads.rendezvous import PendingOp
from shardproof.harness.worlds.threads.scheduler import Scheduler, SleepingRank

_HINT = "make every rank issue the same collectives of each group, in one order"


@dataclass(slots=True, kw_only=True, eq=False)
class Waiter:
    """One blocked thread; released when the operation that it awaits is over."""

    awaited: PendingOp
    call: Call
    thread: int
    sleeper: SleepingRank
    is_released: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class DeadlockDetector:
    """All blocked threads of a world, and the ranks that have returned; guarded by the turns' lock."""

    world_size: int
    scheduler: Scheduler
    departed: set[int] = field(default_factory=set)
    _waiters: dict[Waiter, None] = field(default_factory=dict)
    _threads: dict[int, set[int]] = field(default_factory=dict)
    _homes: dict[int, int] = field(default_factory=dict)

    def note_thread(self, rank: int) -> None:
        """Record that the calling thread communicates for ``rank``."""
        thread = threading.get_ident()
        self._threads.setdefault(rank, set()).add(thread)
        if is_home_thread():
            self._homes[rank] = thread

    def enter(self, awaited: PendingOp, call: Call) -> Waiter:
        """Record that the calling thread is about to block."""
        sleeper = self.scheduler.sleeper()
        waiter = Waiter(awaited=awaited, call=call, thread=threading.get_ident(), sleeper=sleeper)
        self._waiters[waiter] = None
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """Record that a waiter has given up by itself."""
        self._waiters.pop(waiter, None)

    def release(self, awaited: PendingOp | None) -> None:
        """Release all ranks that wait for ``awaited``; None releases all."""
        for waiter in [w for w in self._waiters if awaited is None or w.awaited is awaited]:
            waiter.is_released = True
            del self._waiters[waiter]
            self.scheduler.wake(waiter.sleeper)

    def resolve(self) -> None:
        """Fail the operations that can never complete, and release the threads that wait for them."""
        departed = frozenset(self.departed)
        stuck = list(self._waiters) if self._is_deadlock() else []
        stuck = stuck or [w for w in self._waiters if departed and w.awaited.is_unsatisfiable(departed)]
        if not stuck:
            return
        table = self._table()
        for awaited in {id(w.awaited): w.awaited for w in stuck}.values():
            awaited.error = DeadlockError(
                awaited.where,
                expected=f"rank(s) {list(awaited.absent())} to come",
                got=f"no rank that still can\n{table}\n",
                hint=_HINT,
            )
            awaited.is_over = True
            self.release(awaited)

    def _is_deadlock(self) -> bool:
        if (
            len(self._waiters) + len(self.departed) < self.world_size
        ):  # the usual case, decided without a loop
            return False
        blocked = {w.thread for w in self._waiters}
        alive = {t.ident for t in threading.enumerate()}
        return all(
            rank in self.departed
            or (self._homes.get(rank) in blocked and (self._threads[rank] & alive) <= blocked)
            for rank in range(self.world_size)
        )

    def _table(self) -> str:
        rows = {
            w.call.global_rank: f"  rank {w.call.global_rank} waits for rank(s)"
            f" {list(w.awaited.absent())} in {w.awaited.where}: {w.call}"
            for w in self._waiters
        }
        for rank in range(self.world_size):
            rows.setdefault(
                rank,
                f"  rank {rank} has returned" if rank in self.departed else f"  rank {rank} is computing",
            )
        return "\n".join(rows[rank] for rank in sorted(rows))
