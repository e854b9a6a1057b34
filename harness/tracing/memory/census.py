"""Counts the bytes that one rank holds: every storage that its operators made, as long as it lives.

[Note: what a census sees] A dispatch mode takes a weak reference to each storage that an operator makes on the rank's
thread. torch clears the reference when the last holder releases the storage: a module, a closure, a global list, an
autograd graph or C++ code. It does not matter where the storage is kept, or which tensors the adapter reports. The
census misses memory that no operator on the rank's thread makes:

- memory outside tensors, such as NumPy arrays, bytes and files, and tensors that wrap it
- memory that an engine's own threads, its other processes and compiled code allocate
- memory that an engine frees before the count and allocates again after it; lifetimes detect that
- storages that are made without an operator, such as ``torch.UntypedStorage(n)``, while the harness reads the engine,
  or by the import of its module
- tensors that are not strided, such as sparse ones

With ``Watch.ALLOCATOR``, the growth of the whole process is counted as well. That count includes all of these except
files, other processes, and memory that an engine maps or frees by itself.

Memory that the harness makes to observe is not counted, and neither are the user's tensors that the loop holds.

[Note: late release] Over gloo a worker thread holds a work, with its tensors, until some time after the wait for it
(pytorch#179291). A reference cycle keeps memory until Python collects it. The engine causes neither. So a count above
the size that the layout explains is repeated: after a collection, and then every few milliseconds up to a bound. An
engine that holds only its share is counted once.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from heapq import nlargest
from operator import itemgetter
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardproof.harness.torch_compat.tensor_trees import tensors_in
from shardproof.harness.tracing.collectives.call_site import call_site
from shardproof.harness.tracing.ledger import Phase
from shardproof.harness.tracing.memory.memory_report import CensusEntry, CensusTime, LiveStorage
from shardproof.harness.tracing.memory.process_memory import Growth, allocator
from shardproof.harness.tracing.recorder import Recorder

_NUM_LARGEST = 4  # enough to identify the kind of memory
_BELOW = 4  # frames of this module, and its own, before the caller's
_RETRY_S = 0.005
_MAX_RETRIES = (
    60  # a worker thread that waits for a core on a busy machine gets one within a third of a second
)


class _Seen(weakref.ref[torch.UntypedStorage]):
    """A weak reference with the origin of its storage, and whether the user holds it, as an output or for good."""

    __slots__ = ("device", "is_output", "is_users", "key", "operator", "shape", "site")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        super().__init__(storage)  # type: ignore[call-arg]  # its stub knows __new__ alone
        self.key = id(storage)
        self.device = storage.device.type
        self.shape: tuple[int, ...] = ()
        self.operator = ""
        self.site = call_site(_BELOW)
        self.is_users = self.is_output = False


@dataclass(slots=True)
class _Limit:
    """The bytes up to which a count need not wait, and those that remained after a full wait."""

    num_bytes: int = -1
    stayed: int = -1
    pieces: Counter[LiveStorage] = field(default_factory=Counter)  # of the count that set it

    def settles(self, num_bytes: int, *, waits_again: bool = False) -> bool:
        """Return whether waiting is of no use: a count that stayed too high is a breach already."""
        return num_bytes <= (self.num_bytes if waits_again else max(self.num_bytes, self.stayed))


class Census:
    """One rank's storages; with ``is_process_measured`` also the growth of the rank's process."""

    def __init__(self, recorder: Recorder, *, is_process_measured: bool = False) -> None:
        self._recorder = recorder
        self._seen: dict[int, _Seen] = {}  # by the storage's id, which may be reused after its end
        self._counts: list[CensusEntry] = []
        self._explained: dict[object, _Limit] = {}  # at the last look, by what explains them
        self._fewest: dict[tuple[str, int], _Limit] = {}  # by what is shown, and the loads before
        self._in_use = allocator() if is_process_measured else None
        self._growth: Growth | None = None
        self._most: _Limit | None = None  # while every operator is a moment to count at
        self._peak: CensusEntry | None = None
        self.observed_bytes = 0  # held by the harness's own reads

    @property
    def counts(self) -> tuple[CensusEntry, ...]:
        return tuple(self._counts)

    def measure_process(self) -> None:
        """Measure the growth of the process from now on, if that was requested."""
        if self._in_use is not None and self._growth is None:
            # Libraries allocate buffers of up to 10 MB at their first large products and keep them. Warm up, so that
            # the count excludes them.
            large = torch.ones(1024, 1024, requires_grad=True)
            torch.ones(4, 1024).matmul(large).sum().backward()  # type: ignore[no-untyped-call]  # torch's own
            del large
            gc.collect()
            self._growth = Growth(self._in_use)

    # Any: what an operator returns.
    def made(self, result: Any, operator: str) -> None:
        """Record the storages that an operator returned, unless it runs to observe."""
        if self._recorder.phase is Phase.OBSERVE:
            return
        if isinstance(result, torch.Tensor):  # nearly always
            self._note(result, operator)
        else:
            for tensor in tensors_in(result):
                self._note(tensor, operator)
        if self._most is not None:
            self._count_peak(self._most)

    def holds(self, tensors: Iterable[torch.Tensor], *, are_outputs: bool = False) -> None:
        """Exclude the storages of tensors that the user holds; of outputs until the last backward of a step."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if (seen := self._note(local, "unknown")) is not None:
                seen.is_output |= are_outputs
                seen.is_users |= not are_outputs

    @contextmanager
    def filling(self, explained: int) -> Iterator[None]:
        """Count after every operator until exit, and keep the count with the most bytes, also if it is explained."""
        self._most = _Limit(num_bytes=explained)
        try:
            yield
        finally:
            self._most = None

    @property
    def peak(self) -> CensusEntry | None:
        """The count with the most bytes while the model was filled."""
        return self._peak

    def _count_peak(self, limit: _Limit) -> None:
        sizes = self._sizes()
        if limit.stayed < 0:  # one count that stayed too high is enough
            sizes = self._waited(sizes, limit)
        if self._peak is None or _total(sizes) > self._peak.num_bytes:
            self._peak = self._entry(0, CensusTime.FILLING, sizes)

    def end_backwards(self) -> None:
        """Count from now on outputs that the user does not hold for good."""
        for seen in self._seen.values():
            seen.is_output = False

    def take(
        self,
        step: int,
        moment: CensusTime,
        explained: Callable[[], int] | None,
        *,
        state_bytes: int | None = None,
        kind: object = None,
        shown: Callable[[], str] | None = None,
        num_loads: int = 0,
    ) -> None:
        """Count now; above a limit, repeat the count until late releases are done.

        The limit is what the layout explains, the same for counts of one ``kind``. What the engine has ``shown`` is
        read once that count is done, because reading may free memory. Then it is counted again, and the limit is the
        fewest bytes of earlier counts at which the engine showed the same.
        """
        sizes = self._sizes()
        if explained is not None:
            limit = self._explained.setdefault(kind, _Limit())
            if _total(sizes) > limit.num_bytes:
                limit.num_bytes = explained()  # state may have grown since, or this is the first count
            sizes = self._waited(sizes, limit, waits_again=self._in_use is not None)
        entry = replace(
            self._entry(step, moment, sizes),
            process_bytes=self._process_bytes(),
            state_bytes=state_bytes,
            num_loads=num_loads,
        )
        self._counts.append(entry if shown is None else self._compared(entry, shown()))

    @staticmethod
    def _entry(step: int, moment: CensusTime, sizes: list[tuple[_Seen, int]]) -> CensusEntry:
        largest = nlargest(_NUM_LARGEST, sizes, key=itemgetter(1))
        return CensusEntry(
            step=step,
            moment=moment,
            num_bytes=_total(sizes),
            largest=tuple(_piece(seen, num_bytes) for seen, num_bytes in largest),
            device_bytes=sum(num_bytes for seen, num_bytes in sizes if seen.device != "cpu"),
        )

    def _waited(
        self, sizes: list[tuple[_Seen, int]], limit: _Limit, *, waits_again: bool = False
    ) -> list[tuple[_Seen, int]]:
        for retry in range(_MAX_RETRIES):
            if limit.settles(_total(sizes), waits_again=waits_again):
                return sizes
            if retry:
                time.sleep(_RETRY_S)
            else:
                gc.collect()
            sizes = self._sizes()
        limit.stayed = max(limit.stayed, _total(sizes))
        return sizes

    def _compared(self, entry: CensusEntry, shown: str) -> CensusEntry:
        """Remember a count with the fewest bytes; else add what is alive in addition to that count."""
        key = (shown, entry.num_loads)
        sizes, fewest = self._sizes(), self._fewest.get(key)
        if fewest is not None:
            sizes = self._waited(sizes, fewest)
        elif any(
            digest == shown and before.num_bytes < _total(sizes)
            for (digest, _), before in self._fewest.items()
        ):
            gc.collect()  # a model in whose place another was loaded may be a cycle
            sizes = self._sizes()
        num_bytes, since = _total(sizes), list[LiveStorage]()
        if fewest is None or num_bytes != fewest.num_bytes:
            pieces = Counter(_piece(seen, each) for seen, each in sizes)
            if fewest is None or num_bytes < fewest.num_bytes:
                self._fewest[key] = _Limit(num_bytes=num_bytes, pieces=pieces)
            else:
                since = nlargest(_NUM_LARGEST, pieces - fewest.pieces, key=lambda piece: piece.num_bytes)
        return replace(entry, shown=shown, left_bytes=num_bytes, since=tuple(since))

    def _process_bytes(self) -> int | None:
        if self._growth is None:
            return None
        gc.collect()
        return self._growth.num_bytes - self.observed_bytes

    def _note(self, tensor: torch.Tensor, operator: str) -> _Seen | None:
        if tensor.layout is not torch.strided or tensor.device.type == "meta":  # DTensors have no is_meta
            return None
        storage = tensor.untyped_storage()
        seen = self._seen.get(id(storage))
        if seen is None or seen() is not storage:
            seen = _Seen(storage)
            seen.shape, seen.operator = tuple(tensor.shape), operator
            self._seen[seen.key] = seen
        return seen

    def _sizes(self) -> list[tuple[_Seen, int]]:
        """Drop ended storages, and return the bytes of all others except the user's."""
        alive = [(seen, storage.nbytes()) for seen in self._seen.values() if (storage := seen()) is not None]
        self._seen = {seen.key: seen for seen, _ in alive}
        return [(seen, num_bytes) for seen, num_bytes in alive if not (seen.is_users or seen.is_output)]


def _total(sizes: Iterable[tuple[_Seen, int]]) -> int:
    return sum(num_bytes for _, num_bytes in sizes)


def _piece(seen: _Seen, num_bytes: int) -> LiveStorage:
    return LiveStorage(
        num_bytes=num_bytes, shape=seen.shape, operator=seen.operator, site=seen.site, device=seen.device
    )
