"""Unique keys for storages, and a notice when each storage ends."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count

import torch


class _Ref(weakref.ref[torch.UntypedStorage]):
    """A weak reference with the address and the key of its storage."""

    __slots__ = ("address", "key")

    def __init__(
        self, storage: torch.UntypedStorage, on_end: Callable[[weakref.ref[torch.UntypedStorage]], None]
    ) -> None:
        super().__init__(storage, on_end)  # type: ignore[call-arg]  # its stub has __new__ alone
        self.address = id(storage)
        self.key = -1


class Storages:
    """Keys for storages, never used twice. ``ended`` returns the keys of ended storages, whichever code released them.

    torch keeps a storage's Python object as long as the storage itself, even if only C++ tensors hold it.
    """

    def __init__(self) -> None:
        self._refs: dict[int, _Ref] = {}
        self._keys = count()
        # A storage may end on any thread, in the middle of any operation, so the callback only appends.
        self._ended: deque[weakref.ref[torch.UntypedStorage]] = deque()

    def key(self, storage: torch.UntypedStorage) -> int:
        found = self._refs.get(id(storage))
        if found is None or found() is not storage:  # a storage that has just ended was at the same address
            found = _Ref(storage, self._ended.append)
            found.key = next(self._keys)
            self._refs[id(storage)] = found
        return found.key

    def ended(self) -> Iterator[int]:
        """Yield the keys of storages that ended since the last call, in the order of their ends."""
        while self._ended:
            ref = self._ended.popleft()
            assert isinstance(ref, _Ref)
            if self._refs.get(ref.address) is ref:
                del self._refs[ref.address]
            yield ref.key
