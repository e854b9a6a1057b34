"""Who watches a rank's memory: all of them are told by one dispatch mode, one door and one hook of resizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from harness.torch_compat.dispatch import make_operators
from harness.torch_compat.patching import Replacement
from harness.tracing.collectives.call import Call
from harness.tracing.current_rank import current_rank
from harness.tracing.operators import OperatorMode, OperatorObserver

__all__ = ["Witness", "current_witnesses", "observing_operators"]


class Witness(OperatorObserver, Protocol):
    """A watch over one rank: told of operators, collectives, waits for them, and resizes of storages."""

    def resized(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Take note that a storage is about to have another size, before it has."""

    # Any: whatever the witness knows a collective by.
    def issued(self, call: Call, seq: int) -> Any:
        """Take note of a collective before it starts; ``seq`` is its place in the ledger, -1 where there is none."""

    def handed_over(self) -> None:
        """Take note that what carries the collective issued last on this thread has been given it."""

    def waited(self, issued: Any) -> None:
        """Take note of a wait for a collective."""


class _Witnesses:
    """All witnesses of a rank, as the door's listener."""

    def __init__(self, witnesses: Sequence[Witness]) -> None:
        self._witnesses = witnesses

    def resized(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        for witness in self._witnesses:
            witness.resized(storage, num_bytes)

    def issued(self, call: Call, seq: int) -> tuple[Any, ...]:
        return tuple(witness.issued(call, seq) for witness in self._witnesses)

    def handed_over(self) -> None:
        for witness in self._witnesses:
            witness.handed_over()

    def waited(self, issued: tuple[Any, ...]) -> None:
        for witness, what in zip(self._witnesses, issued, strict=True):
            witness.waited(what)


_of_rank: dict[int | None, _Witnesses] = {}  # None is the only rank of its process


def current_witnesses() -> _Witnesses | None:
    """Give the witnesses of the calling thread's rank, if there are any."""
    return _of_rank.get(current_rank()) if _of_rank else None


@contextmanager
def observing_operators(*witnesses: Witness) -> Iterator[None]:
    """Tell the witnesses what the calling thread's rank does to memory, until exit; with none, change nothing."""
    if not witnesses:
        yield
        return
    with _heard_resizes:
        _of_rank[current_rank()] = _Witnesses(witnesses)
        try:
            with OperatorMode(witnesses):
                yield
        finally:
            del _of_rank[current_rank()]


# Any: whatever the storage was told.
def _telling(resize: Any) -> Any:
    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        witnesses = current_witnesses()
        if witnesses is not None and storage.nbytes() != size:
            witnesses.resized(storage, size)
        return resize(storage, size)

    return resize_


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    make_operators()
    yield torch.UntypedStorage, "resize_", _telling(torch.UntypedStorage.resize_)


_heard_resizes = Replacement(_replacements)
