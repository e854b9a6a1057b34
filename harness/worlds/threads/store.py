"""The key-value store of the threads world: what torch's own rendezvous and barriers of groups go through."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from harness.torch_compat.process_groups import Store
from harness.worlds.threads.scheduler import Scheduler, SleepingRank

__all__ = ["MemoryStore"]

_TIMEOUT = timedelta(minutes=5)  # where the caller gives none; torch's own stores have the same


class MemoryStore(Store):
    """A store in memory whose waits let other ranks have their turn, as torch's own in C++ would not.

    ``turns`` are those of the ranks that run now. Methods are named as torch's C++ looks them up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.turns = Scheduler(0)
        self._values: dict[str, bytes] = {}
        self._sleepers: dict[SleepingRank, Sequence[str]] = {}  # and the keys that each waits for

    def set(self, key: str, value: bytes | str) -> None:
        """Set a value; whoever waits for the key goes on."""
        with self.turns.lock:
            self._put(key, value if isinstance(value, bytes) else value.encode())

    def get(self, key: str) -> bytes:
        """Wait for a key and give its value."""
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first; gives the sum."""
        with self.turns.lock:
            total = int(self._values.get(key, b"0")) + amount
            self._put(key, str(total).encode())
            return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:  # type: ignore[override]
        """Set a value where the old one is as expected, or where both are missing; gives what is there then."""
        with self.turns.lock:
            if self._values.get(key, b"") == bytes(expected):
                self._put(key, bytes(desired))
            return self._values.get(key, bytes(expected))

    def check(self, keys: Sequence[str]) -> bool:
        """Say whether all keys are there."""
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta = _TIMEOUT) -> None:
        """Wait for all keys; raises DistStoreError where they do not come in time."""
        with self.turns.lock:
            if self.check(keys):
                return
            sleeper = self.turns.sleeper()
            self._sleepers[sleeper] = keys
            self.turns.sleep(sleeper, lambda: self.check(keys), time.monotonic() + timeout.total_seconds())
            del self._sleepers[sleeper]
            if not self.check(keys):
                raise dist.DistStoreError(f"timeout: no {list(keys)} within {timeout.total_seconds()} s")

    def deleteKey(self, key: str) -> bool:  # noqa: N802 - C++'s name
        """Remove a key; says whether it was there."""
        return self._values.pop(key, None) is not None

    def getNumKeys(self) -> int:  # noqa: N802 - C++'s name
        """Count the keys."""
        return len(self._values)

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for sleeper, keys in self._sleepers.items():
            if self.check(keys):
                self.turns.wake(sleeper)
