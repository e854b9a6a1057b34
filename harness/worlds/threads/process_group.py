"""The process-group backend `threads`: its store, its groups, and the splitting of groups."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardproof.harness.errors import EngineError
from shardproof.harness.torch_compat.process_groups import GroupOptions, Store, create_subgroup, fake_backend
from shardproof.harness.worlds.threads.scheduler import Scheduler, SleepingRank

_TIMEOUT = timedelta(minutes=5)  # the default, equal to that of torch's own stores


class MemoryStore(Store):
    """A store in memory whose waits let other ranks run, unlike torch's own stores in C++.

    ``turns`` are the turns of the ranks that run now. torch's C++ looks up the methods by these names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(0)
        self._values: dict[str, bytes] = {}
        self._sleepers: dict[SleepingRank, Sequence[str]] = {}  # and the keys that each waits for

    def set(self, key: str, value: bytes | str) -> None:
        """Set a value, and wake the ranks that wait for the key."""
        with self.scheduler.lock:
            self._put(key, value if isinstance(value, bytes) else value.encode())

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is initially 0; returns the sum."""
        with self.scheduler.lock:
            total = int(self._values.get(key, b"0")) + amount
            self._put(key, str(total).encode())
            return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:  # type: ignore[override]
        """Set a value if the old one equals ``expected``, or if both are missing; returns the value afterwards."""
        with self.scheduler.lock:
            if self._values.get(key, b"") == bytes(expected):
                self._put(key, bytes(desired))
            return self._values.get(key, bytes(expected))

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta = _TIMEOUT) -> None:
        """Wait for all keys; raises DistStoreError if they do not arrive in time."""
        with self.scheduler.lock:
            if self.check(keys):
                return
            sleeper = self.scheduler.sleeper()
            self._sleepers[sleeper] = keys
            self.scheduler.sleep(
                sleeper, lambda: self.check(keys), time.monotonic() + timeout.total_seconds()
            )
            del self._sleepers[sleeper]
            if not self.check(keys):
                raise dist.DistStoreError(f"timeout: no {list(keys)} within {timeout.total_seconds()} s")

    def deleteKey(self, key: str) -> bool:  # noqa: N802 - C++'s name
        """Remove a key; returns whether it existed."""
        return self._values.pop(key, None) is not None

    def getNumKeys(self) -> int:  # noqa: N802 - C++'s name
        return len(self._values)

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for sleeper, keys in self._sleepers.items():
            if self.check(keys):
                self.scheduler.wake(sleeper)


def split_group(
    parent_pg: dist.ProcessGroup | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: object = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> dist.ProcessGroup | None:
    """Split ``parent_pg`` by ranks within it, as `torch.distributed.split_group` documents.

    Returns this rank's part, or None on a rank that is in no part.
    """
    if not split_ranks:
        raise ValueError(f"split_group: expected a list of lists of ranks, got {split_ranks!r}")
    parent = parent_pg or dist.group.WORLD
    if parent is None:
        raise ValueError(
            "split_group: expected an initialized default process group; call init_process_group"
        )
    parent_ranks = dist.get_process_group_ranks(parent)
    parts = [sorted(part) for part in split_ranks]
    for part in parts:
        _check_part(part, len(parent_ranks))
    nth = _next_split(parent)
    mine = next((part for part in parts if parent.rank() in part), None)
    if mine is None:
        return None
    ranks = [parent_ranks[rank] for rank in mine]
    # Every member of the parent splits the same number of times, so all of them compute the same name.
    name = f"{parent.group_name}:split:{nth}:{'_'.join(map(str, ranks))}"
    description = group_desc or f"{parent.group_desc}:split:{nth}"
    return create_subgroup(
        ranks, GroupOptions(backend or dist.get_backend(parent), name, timeout, description)
    )


def split_method(
    self: dist.ProcessGroup,
    ranks: Sequence[int],
    timeout: timedelta | None = None,
    opts: object = None,
    group_name: str | None = None,
    group_desc: str | None = None,
    device_types: object = None,
) -> dist.ProcessGroup | None:
    """Split this group as `ProcessGroup.split_group` does: one part, under ``group_name`` if given."""
    if group_name is None:
        return split_group(self, [ranks], timeout, group_desc=group_desc)
    part = sorted(ranks)
    parent_ranks = dist.get_process_group_ranks(self)
    _check_part(part, len(parent_ranks))
    if self.rank() not in part:
        return None
    options = GroupOptions(dist.get_backend(self), group_name, timeout, group_desc)
    return create_subgroup([parent_ranks[rank] for rank in part], options)


def _check_part(part: Sequence[int], parent_size: int) -> None:
    if not part or len(part) != len(set(part)) or not set(part) <= set(range(parent_size)):
        raise ValueError(
            f"split_group: expected distinct ranks within a group of {parent_size}, got {list(part)}"
        )


# One count per group object; a group belongs to one rank, so threads never share an entry.
_splits: dict[dist.ProcessGroup, int] = {}


def _next_split(parent: dist.ProcessGroup) -> int:
    nth = _splits.get(parent, 0)
    _splits[parent] = nth + 1
    return nth


BACKEND = "threads"


def register_threads_backend(device: str = "cpu") -> None:
    """Register the backend so that ``init_process_group("threads")`` works in this process; idempotent."""
    if BACKEND not in dist.Backend.backend_list:
        devices = list(dict.fromkeys(("cpu", device)))
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=devices)


def global_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return a group's global ranks in group order, for any backend.

    An engine may build a group without `new_group`, so that torch has no record of its ranks. If the group is as large
    as the world and this rank has its own number there, all ranks are assumed to have theirs.
    """
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError as unknown:
        size = dist.get_world_size()
        if (group.rank(), group.size()) != (dist.get_rank(), size):
            raise EngineError(
                f"process group {group.group_name!r}",
                expected=f"one of new_group, or of all {size} ranks in their order",
                got=f"rank {group.rank()} of {group.size()}, whose global ranks torch does not know",
                hint="new_group in the engine",
            ) from unknown
        return tuple(range(size))


def _create(options: Any, _backend_options: object) -> Any:  # Any: torch passes C++ values without stubs
    return fake_backend(options.group_rank, options.group_size)
