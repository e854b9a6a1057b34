"""Turns of rank threads: one runs at a time, in an order that only the seed decides, until turns end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from shardproof.harness.tracing.current_rank import adopt_rank, bind_rank
from shardproof.harness.worlds.threads import scheduler as module
from shardproof.harness.worlds.threads.process_group import MemoryStore
from shardproof.harness.worlds.threads.scheduler import Scheduler

_HANG_S = 20.0
Body = Callable[[int, Scheduler], None]


def live(
    size: int,
    body: Body,
    seed: int = 0,
    longest_s: float = 5.0,
    stalled_after_s: float = module.STALLED_AFTER_S,
) -> Scheduler:
    """Run a body on each rank's thread between its beginning and its end."""
    scheduler = Scheduler(size, seed, longest_s, stalled_after_s)

    def run(rank: int) -> None:
        bind_rank(rank)
        scheduler.begin(rank)
        try:
            body(rank, scheduler)
        finally:
            scheduler.end(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads[::-1]:  # the order in which threads start must not matter
        thread.start()
    for thread in threads:
        thread.join(_HANG_S)
    assert not any(thread.is_alive() for thread in threads), "a rank never had its turn"
    return scheduler


def order(size: int, seed: int) -> list[int]:
    """Return the order of turns, where each rank offers its own turn four times."""
    taken: list[int] = []

    def body(rank: int, scheduler: Scheduler) -> None:
        for _ in range(4):
            taken.append(rank)
            scheduler.offer()

    live(size, body, seed)
    return taken


def test_by_default_a_rank_runs_until_it_must_wait() -> None:
    assert order(3, seed=0) == [0] * 4 + [1] * 4 + [2] * 4


def test_a_seed_decides_and_nothing_else() -> None:
    assert all(order(3, seed=7) == order(3, seed=7) for _ in range(20))
    assert len({tuple(order(3, seed)) for seed in range(1, 11)}) > 5


def test_a_rank_that_polls_lets_the_others_run() -> None:
    is_there = False

    def body(rank: int, scheduler: Scheduler) -> None:
        nonlocal is_there
        if rank:
            is_there = True
        while not is_there:
            scheduler.give_way()

    assert live(2, body).given_up is None


def test_sleeping_ranks_are_woken_in_the_order_of_the_seed() -> None:
    woken: list[int] = []
    is_open = False

    def body(rank: int, scheduler: Scheduler) -> None:
        nonlocal is_open
        with scheduler.lock:
            if rank < 3:
                sleepers[rank] = scheduler.sleeper()
                scheduler.sleep(sleepers[rank], lambda: is_open)
                woken.append(rank)
            else:
                is_open = True
                for sleeper in (sleepers[2], sleepers[0], sleepers[1]):
                    scheduler.wake(sleeper)

    sleepers: dict[int, module.SleepingRank] = {}
    live(4, body)
    assert woken == [0, 1, 2]


def test_turns_end_where_a_rank_waits_for_another_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.01)
    is_there = threading.Event()

    def body(rank: int, scheduler: Scheduler) -> None:
        if rank:
            is_there.set()
        assert is_there.wait(_HANG_S)

    scheduler = live(2, body, stalled_after_s=0.05)
    assert scheduler.given_up == "rank 0 waits for something else than communication"


def test_turns_end_where_a_rank_waits_for_one_that_has_slept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.01)
    is_over, is_there = False, threading.Event()
    sleepers: dict[int, module.SleepingRank] = {}

    def body(rank: int, scheduler: Scheduler) -> None:
        nonlocal is_over
        with scheduler.lock:
            if rank == 0:
                sleepers[rank] = scheduler.sleeper()
                scheduler.sleep(sleepers[rank], lambda: is_over)
            else:
                is_over = True
                scheduler.wake(sleepers[0])  # which is not woken before its turn, and must still look
        if rank == 0:
            is_there.set()
        assert is_there.wait(_HANG_S)

    scheduler = live(2, body, stalled_after_s=0.05)
    assert scheduler.given_up == "rank 1 waits for something else than communication"


def test_turns_end_where_a_rank_computes_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.01)
    is_over = threading.Event()

    def body(rank: int, scheduler: Scheduler) -> None:
        if rank:
            is_over.set()
        while not is_over.is_set():
            pass

    assert live(2, body, longest_s=0.05).given_up == "rank 0 has not communicated for 0.05 s"


def test_turns_end_where_a_rank_communicates_on_another_thread() -> None:
    def body(rank: int, scheduler: Scheduler) -> None:
        def communicate() -> None:
            adopt_rank(rank)
            scheduler.offer()
            with scheduler.lock:
                scheduler.sleeper()

        if rank == 0:
            thread = threading.Thread(target=communicate)
            thread.start()
            thread.join(_HANG_S)

    assert live(2, body).given_up == "rank 0 communicates on a thread that it started"


def test_a_rank_that_ends_hands_its_turn_on() -> None:
    ended: list[int] = []
    live(4, lambda rank, scheduler: ended.append(rank))
    assert ended == [0, 1, 2, 3]


# The store, whose waits are turns as well


def test_a_store_lets_others_run_until_a_key_is_there() -> None:
    store = MemoryStore()

    def body(rank: int, scheduler: Scheduler) -> None:
        store.scheduler = scheduler
        mine = PrefixStore("group", store)  # as torch hands it on, through C++
        if rank == 0:
            assert mine.get("key") == b"value"
        else:
            mine.set("key", "value")
        mine.add("count", 2)

    assert live(3, body).given_up is None
    assert PrefixStore("group", store).get("count") == b"6"


def test_a_store_wakes_a_wait_for_several_keys_once_all_are_there() -> None:
    store = MemoryStore()

    def body(rank: int, scheduler: Scheduler) -> None:
        store.scheduler = scheduler
        if rank == 0:
            store.wait(["one", "two"])
        elif rank == 1:
            scheduler.give_way()  # to rank 2, which then yields to the first rank that can go on: not yet rank 0
            store.set("two", "value")
        else:
            store.set("one", "value")
            scheduler.give_way()

    assert live(3, body).given_up is None


def test_a_store_has_the_methods_of_stores() -> None:
    ours = MemoryStore()  # C++ finds its methods as long as Python holds it
    store = PrefixStore("group", ours)
    assert store.compare_set("key", "", "one") == b"one"
    assert store.compare_set("key", "two", "three") == b"one"
    assert store.compare_set("key", "one", "two") == b"two"
    store.append("key", "more")  # type: ignore[attr-defined]  # its stub lacks it
    assert store.get("key") == b"twomore"
    assert (store.check(["key"]), store.num_keys()) == (True, 1)
    assert store.delete_key("key")
    assert not store.check(["key"])
    assert not store.delete_key("key")


def test_a_store_names_missing_keys() -> None:
    with pytest.raises(dist.DistStoreError, match=r"no \['key'\] within 0.01 s"):
        MemoryStore().wait(["key"], timedelta(seconds=0.01))
