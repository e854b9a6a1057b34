"""The transport of the threads world: ranks exchange data in memory. It handles data and waits, not process groups.

[Note: what is late] A call copies its inputs and returns. If it is asynchronous its outputs are poisoned until the rank
waits on its work. So an engine that reads a result too early reads NaN every time, not only sometimes, and one that
never waits trains on NaN. When the result is there, the transport checks the call's buffers. An input that changed or
was freed, or an output that is no longer poison, was accessed while the call was in flight.

[Note: schedules] The seed of the turns alone decides which rank runs, and how late each result is. The first depends on
the transport's own order of calls, the second on each rank's. Under the seed RUN_UNTIL_BLOCKED every result is as late
as possible.
"""

from __future__ import annotations

import copy
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist

from shardproof.harness.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    WorldAbandonedError,
)
from shardproof.harness.torch_compat.accelerators import moment_of
from shardproof.harness.torch_compat.dispatch import raw_access
from shardproof.harness.tracing.collectives.call import Call
from shardproof.harness.tracing.collectives.call_site import call_site
from shardproof.harness.tracing.ledger import Op, ViolationKind
from shardproof.harness.worlds.threads.buffer_guard import BufferGuard, poison
from shardproof.harness.worlds.threads.deadlock import DeadlockDetector
from shardproof.harness.worlds.threads.delayed_work import Delay, DelayedWork
from shardproof.harness.worlds.threads.rendezvous import (
    Contribution,
    Mailbox,
    Message,
    PendingOp,
    PostedReceive,
    Rendezvous,
    snapshot,
)
from shardproof.harness.worlds.threads.scheduler import RUN_UNTIL_BLOCKED, Scheduler
from shardproof.harness.worlds.threads.validation import check_alone

_GroupKey = tuple[str, tuple[int, ...]]
_BoxKey = tuple[_GroupKey, int, int]
# The delay of each asynchronous call is drawn from these; see Delay. The longest detects most, so it has half of them.
_NUM_CALLS = (None, None, None, 0, 1, 3)
_NUM_POLLS = (0, 0, 1, 3)
OnViolation = Callable[[ViolationKind, str], None] | None


class _Open(NamedTuple):
    """An asynchronous work whose result is not written yet, and the receiver of its violations."""

    work: DelayedWork
    on_violation: OnViolation


class InMemoryTransport:
    """State that the rank threads of one world share; moves the data of every intercepted call."""

    def __init__(self, world_size: int, scheduler: Scheduler | None = None) -> None:
        self._scheduler = scheduler or Scheduler(world_size)
        self._lock = self._scheduler.lock
        self._detector = DeadlockDetector(world_size=world_size, scheduler=self._scheduler)
        self._unfinished: dict[tuple[_GroupKey, int], Rendezvous] = {}
        self._next_seq: Counter[tuple[_GroupKey, int]] = Counter()
        self._mailboxes: dict[_BoxKey, Mailbox] = {}
        self._open: dict[int, _Open] = {}
        self._draws = {rank: random.Random(f"{self._scheduler.seed} {rank}") for rank in range(world_size)}
        self._abandoned: str | None = None

    def start(self, call: Call, on_violation: OnViolation = None) -> dist.Work:
        """Start a call and return its work; a synchronous call has completed by then.

        ``on_violation`` receives each use of the buffers of an asynchronous call before its result is there.
        """
        self._scheduler.offer()
        self._pass_call(call.global_rank)
        check_alone(call, f"{call.op} of group {list(call.ranks)} at {call.site}")
        with raw_access():
            arrival = Contribution(call=call, inputs=snapshot(call), moment=moment_of(call.device))
            match call.op:
                case Op.SEND:
                    awaited: PendingOp = self._send(arrival)
                case Op.RECV:
                    awaited = self._receive(call)
                case _:
                    awaited = self._join(arrival)
            guard = None
            if call.is_async:
                poison(call, self._scheduler.seed)
                guard = BufferGuard(call, arrival.inputs, self._scheduler.seed)
        work = DelayedWork(call, awaited, self, guard, self._delay(call))
        if call.is_async:
            with self._lock:
                self._open[id(work)] = _Open(work, on_violation)
        else:
            work.wait()
        return work

    def give_way(self) -> None:
        self._scheduler.give_way()

    def delivered(self, work: DelayedWork, guard: BufferGuard | None) -> None:
        with self._lock:
            found = self._open.pop(id(work), None)
        if found is not None and found.on_violation is not None and guard is not None:
            for kind in guard.violations():
                found.on_violation(kind, call_site())

    def leave(self, rank: int) -> None:
        """Record that a rank's body has returned: it makes no more calls."""
        with self._lock:
            self._detector.departed.add(rank)
            self._detector.resolve()

    def abort(self, reason: BaseException | str) -> None:
        """Wake every blocked rank, now and later, with WorldAbandonedError."""
        with self._lock:
            self._abandoned = self._abandoned or str(reason) or type(reason).__name__
            self._scheduler.give_up("the world ends")
            self._detector.release(None)

    def _pass_call(self, rank: int) -> None:
        """Complete this rank's results whose delay is over."""
        if self._scheduler.seed == RUN_UNTIL_BLOCKED:
            return
        with self._lock:
            works = [o.work for o in self._open.values()]
        for work in works:
            if work.pending is not None and work.pending.global_rank == rank:
                work.pass_call()

    def _delay(self, call: Call) -> Delay:
        draw = self._draws.get(call.global_rank)
        if self._scheduler.seed == RUN_UNTIL_BLOCKED or draw is None:
            return Delay()
        return Delay(num_calls=draw.choice(_NUM_CALLS), num_polls=draw.choice(_NUM_POLLS))

    def _join(self, arrival: Contribution) -> Rendezvous:
        call = arrival.call
        group = (call.group_name, call.ranks)
        with self._lock:
            self._enter(call)
            seq = self._next_seq[group, call.rank]
            self._next_seq[group, call.rank] = seq + 1
            rendezvous = self._unfinished.get((group, seq))
            if rendezvous is None:
                rendezvous = Rendezvous(
                    f"collective #{seq} of group {call.group_name} {list(call.ranks)}", call.ranks
                )
                self._unfinished[group, seq] = rendezvous
            if rendezvous.error is not None:
                raise copy.copy(rendezvous.error)
            try:
                rendezvous.add(arrival)
            except CollectiveMismatchError as error:
                self._finish(rendezvous, error)
                raise
            if not rendezvous.is_full:
                return rendezvous
            del self._unfinished[group, seq]
        self._settle(rendezvous)
        return rendezvous

    def _settle(self, rendezvous: Rendezvous) -> None:
        """Compute outside the lock, so that other groups make progress; then let all ranks take their part."""
        error: CollectiveError | None = None
        try:
            rendezvous.settle()
        except CollectiveError as e:
            error = e
        with self._lock:
            self._finish(rendezvous, error)

    def _send(self, arrival: Contribution) -> Message:
        call = arrival.call
        destination = "no rank" if call.peer is None else f"rank {call.ranks[call.peer]}"
        where = f"a message to {destination} in group {call.group_name} {list(call.ranks)}"
        message = Message(where, arrival)
        with self._lock:
            self._enter(call)
            posted = self._mailbox(call, call.peer).deliver(message)
            if posted is not None:
                self._hand_over(posted, message)
        return message

    def _receive(self, call: Call) -> PostedReceive:
        source = "any rank" if call.peer is None else f"rank {call.ranks[call.peer]}"
        posted = PostedReceive(f"a message from {source} in group {call.group_name} {list(call.ranks)}", call)
        with self._lock:
            self._enter(call)
            message = self._mailbox(call, call.rank).post(posted)
            if message is not None:
                self._hand_over(posted, message)
        return posted

    def _hand_over(self, posted: PostedReceive, message: Message) -> None:
        error: CollectiveError | None = None
        try:
            posted.take(message)
        except CollectiveMismatchError as e:
            error = e
        self._finish(posted, error)
        self._finish(message, error)

    def _mailbox(self, call: Call, destination: int | None) -> Mailbox:
        key = ((call.group_name, call.ranks), -1 if destination is None else destination, call.tag)
        return self._mailboxes.setdefault(key, Mailbox())

    def _enter(self, call: Call) -> None:
        if self._abandoned is not None:
            raise WorldAbandonedError(self._abandoned)
        self._detector.note_thread(call.global_rank)

    def _finish(self, awaited: PendingOp, error: CollectiveError | None) -> None:
        awaited.error = error
        awaited.is_over = True
        self._detector.release(awaited)

    def block(self, awaited: PendingOp, call: Call, timeout_s: float | None) -> None:
        with self._lock:
            if not awaited.is_over:
                if self._abandoned is not None:
                    raise WorldAbandonedError(self._abandoned)
                self._detector.note_thread(call.global_rank)
                self._sleep(awaited, call, timeout_s)
            error = awaited.error
        if error is not None:
            raise copy.copy(error)  # one copy per rank, with its own traceback

    def _sleep(self, awaited: PendingOp, call: Call, timeout_s: float | None) -> None:
        waiter = self._detector.enter(awaited, call)
        self._detector.resolve()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._scheduler.sleep(waiter.sleeper, lambda: waiter.is_released, deadline)
        if not waiter.is_released:
            self._detector.leave(waiter)
            self._finish(awaited, _timeout(awaited, call, timeout_s))
            return
        if not awaited.is_over and self._abandoned is not None:
            raise WorldAbandonedError(self._abandoned)


def _timeout(awaited: PendingOp, call: Call, timeout_s: float | None) -> CollectiveTimeoutError:
    return CollectiveTimeoutError(
        awaited.where,
        expected=f"every rank within {timeout_s} s",
        got=f"no call from rank(s) {list(awaited.absent())}; rank {call.global_rank} called {call}",
        hint="the stacks of the ranks that did not come",
    )
