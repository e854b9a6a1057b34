"""The cooperative scheduler: rank threads run one at a time and switch where they communicate, in an order from a seed.

[Note: why turns] Runs of rank threads differ in the order in which ranks arrive at a rendezvous. If only one thread
runs, and switches only at communication, then the scheduler alone decides that order. The same seed gives the same run,
whatever else the machine does. Threads of one process share the interpreter's lock, so this costs little.

[Note: given up] A rank that waits for anything but communication, such as a lock that another rank holds, would keep
its turn for ever. So would a rank that computes for ever. A thread that an engine starts beside the rank's own has no
turn. In all these cases turns are given up: all ranks run freely from then on, and may behave differently from run to
run.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from shardproof.harness.tracing.current_rank import current_rank, is_home_thread

RUN_UNTIL_BLOCKED = 0
"""The seed under which a rank hands over only where it has to, to the next one in order of ranks."""

_LOOK_EVERY_S = 0.25
# Using next to nothing of a processor: longer than a busy machine keeps a thread waiting.
STALLED_AFTER_S = 1.0
_NEXT_TO_NOTHING = 0.05
_LONGEST_TURN_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class SleepingRank:
    """A thread that sleeps, or is about to; ``rank`` is None for one without turns."""

    rank: int | None
    condition: threading.Condition


class Scheduler:
    """The turns of one world. ``lock`` guards them, and all state that its users change together with them.

    A thread that never called `begin`, and every other thread of the rank, runs freely. A turn longer than
    ``longest_s`` is the last one, and so is one that uses no processor for ``stalled_after_s``.
    """

    def __init__(
        self,
        world_size: int,
        seed: int = RUN_UNTIL_BLOCKED,
        longest_s: float = _LONGEST_TURN_S,
        stalled_after_s: float = STALLED_AFTER_S,
    ) -> None:
        self.lock = threading.Lock()
        self._longest_s = min(longest_s, _LONGEST_TURN_S)
        self._stalled_after_s = stalled_after_s
        self.seed = seed
        self.given_up: str | None = None
        self._random = random.Random(seed)
        self._absent = set(range(world_size))  # ranks that have not begun
        self._ready: set[int] = set()
        self._holder: int | None = None
        self._last = -1
        self._num_turns = 0
        self._sleepers = {
            rank: SleepingRank(rank, threading.Condition(self.lock)) for rank in range(world_size)
        }
        self._clocks: dict[int, int] = {}  # of ranks between their beginning and their end

    def begin(self, rank: int) -> None:
        """Enter on the rank's own thread; returns once all ranks have entered and it is this one's turn."""
        with self.lock:
            self._clocks[rank] = time.pthread_getcpuclockid(threading.get_ident())
            self._absent.discard(rank)
            self._ready.add(rank)
            self._hand_over_from(None)
            self._await_turn(rank)

    def end(self, rank: int) -> None:
        with self.lock:
            self._absent.discard(rank)
            self._ready.discard(rank)
            self._clocks.pop(rank, None)
            self._hand_over_from(rank)

    def offer(self) -> None:
        """Let another rank go first, if the seed decides so."""
        if self.seed == RUN_UNTIL_BLOCKED:
            return
        with self.lock:
            rank = self.sleeper().rank
            if rank is not None and self.given_up is None:
                self._hand_over_from(rank)
                self._await_turn(rank)

    def give_way(self) -> None:
        """Let another rank go first if any can: this one polls for a result that needs another rank."""
        with self.lock:
            rank = self.sleeper().rank
            if rank is not None and self.given_up is None and len(self._ready) > 1:
                self._ready.discard(rank)
                self._hand_over_from(rank)
                self._ready.add(rank)
                self._await_turn(rank)

    def sleeper(self) -> SleepingRank:
        """Return the sleeper of the calling thread, which holds ``lock``; `wake` takes it."""
        rank = current_rank()
        if rank is None or rank not in self._clocks:
            return SleepingRank(None, threading.Condition(self.lock))
        if not is_home_thread():
            self.give_up(f"rank {rank} communicates on a thread that it started")
            return SleepingRank(None, threading.Condition(self.lock))
        return self._sleepers[rank]

    def sleep(
        self, sleeper: SleepingRank, is_over: Callable[[], bool], deadline: float | None = None
    ) -> None:
        """Let others run until ``is_over``, or until the deadline by time.monotonic; the caller holds ``lock``."""
        rank = sleeper.rank
        if rank is not None:
            self._ready.discard(rank)
            self._hand_over_from(rank)
        # A waiting rank sees that its wait is over when it is scheduled; until then it checks that turns still pass.
        longest_s = None if rank is None else _LOOK_EVERY_S
        while not is_over():
            left_s = longest_s
            if deadline is not None:
                left_s = min(deadline - time.monotonic(), longest_s or math.inf)
                if left_s <= 0:
                    break
            sleeper.condition.wait(left_s)
        if rank is not None:
            self.wake(sleeper)
            self._await_turn(rank)

    def wake(self, sleeper: SleepingRank) -> None:
        """Wake the threads that wait for a condition; the caller holds ``lock``.

        A rank with turns is woken by its turn alone: waking it twice would double the switches between threads.
        """
        if sleeper.rank in self._clocks:
            self._ready.add(sleeper.rank)
            self._hand_over_from(None)
        if sleeper.rank not in self._clocks or self.given_up is not None:
            sleeper.condition.notify_all()

    def give_up(self, why: str) -> None:
        """Let all ranks run freely from now on; the caller holds ``lock``."""
        if self.given_up is None:
            self.given_up = why
            for sleeper in self._sleepers.values():
                sleeper.condition.notify_all()

    def _hand_over_from(self, rank: int | None) -> None:
        """Pass the turn on if ``rank`` holds it (None: no rank holds it); does nothing before all ranks have begun."""
        if self._holder != rank or self._absent:
            return
        self._holder = self._pick()
        if self._holder is not None:
            self._last = self._holder
            self._num_turns += 1
            self._sleepers[self._holder].condition.notify_all()

    def _pick(self) -> int | None:
        ranks = sorted(self._ready)
        if not ranks:
            return None
        if self.seed == RUN_UNTIL_BLOCKED:
            return next((rank for rank in ranks if rank > self._last), ranks[0])
        return self._random.choice(ranks)

    def _await_turn(self, rank: int) -> None:
        look = _Look(self._stalled_after_s)
        while self._holder != rank and self.given_up is None:
            self._sleepers[rank].condition.wait(_LOOK_EVERY_S)
            holder = self._holder
            if holder is None:
                continue
            look.again(self._num_turns, _cpu_s(self._clocks.get(holder)))
            if look.is_stalled:
                self.give_up(f"rank {holder} waits for something else than communication")
            elif look.lasts_s > self._longest_s:
                self.give_up(f"rank {holder} has not communicated for {self._longest_s:g} s")


class _Look:
    """How long one turn has lasted, as seen by a waiting rank, and whether its holder computes at all."""

    def __init__(self, stalled_after_s: float) -> None:
        self._stalled_after_s = stalled_after_s
        self._turn = -1
        self._began = 0.0
        self._since = 0.0
        self._since_cpu_s = 0.0
        self.lasts_s = 0.0
        self.is_stalled = False

    def again(self, num_turns: int, cpu_s: float) -> None:
        """Update the measurement; ``cpu_s`` is the processor time that the holder has used."""
        now = time.monotonic()
        if self._turn != num_turns:
            self._turn, self._began = num_turns, now
            self._since, self._since_cpu_s = now, cpu_s
        self.lasts_s = now - self._began
        if cpu_s - self._since_cpu_s > _NEXT_TO_NOTHING * (now - self._since):
            self._since, self._since_cpu_s = now, cpu_s
        self.is_stalled = now - self._since >= self._stalled_after_s


def _cpu_s(clock: int | None) -> float:
    return 0.0 if clock is None else time.clock_gettime(clock)
