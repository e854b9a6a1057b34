"""The work of one call: its outputs hold poison until somebody waits, then the result."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from harness.door.call import Call
from harness.ledger.entry import Op
from harness.torch_versions import raw_access
from harness.worlds.agreement import SitedCall
from harness.worlds.awaited import Awaited, Receipt

__all__ = ["LateWork", "poison"]

# Has both halves of every byte wrong for indices and counts, and is negative in every signed dtype.
_GARBAGE_BYTE = 0xA5


class LateWork(dist.Work):
    """One rank's part in something awaited; results are written by the thread that waits, when it waits.

    Taking the future counts as waiting: a C++ reducer then blocks on the future where nothing can see it, so
    that neither an abort nor a deadlock would reach it, and a callback would run on another rank's thread.
    """

    def __init__(
        self,
        sited: SitedCall,
        awaited: Awaited,
        block: Callable[[Awaited, SitedCall, float | None], None],
        on_delivery: Callable[[LateWork], None],
    ) -> None:
        super().__init__()
        self._pending: SitedCall | None = sited  # None once delivered, so that the tensors can go
        self._awaited: Awaited | None = awaited
        self._block = block
        self._on_delivery = on_delivery
        self._delivering = threading.RLock()
        call = sited.call
        # Weak: a work that somebody still holds must not keep the tensors that the engine has let go of.
        self._results = [weakref.ref(t) for part in call.outputs for t in part]
        self._source = call.peer

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until everybody has come, then write the outputs; only the first wait does anything."""
        # C++ spells "no timeout of its own" as zero.
        limit_s = timeout.total_seconds() if timeout else None
        with self._delivering:
            sited, awaited = self._pending, self._awaited
            if sited is None:
                return True
            if awaited is not None:
                self._block(awaited, sited, limit_s or sited.call.timeout_s)
                if isinstance(awaited, Receipt):
                    self._source = awaited.source
                with raw_access():
                    _deliver(awaited, sited.call)
            self._pending = self._awaited = None
            self._on_delivery(self)
        return True

    @property
    def pending(self) -> SitedCall | None:
        """The call, until its result was written."""
        return self._pending

    def get_future(self) -> Any:  # Any: torch.futures.Future over a list of tensors
        """Wait, and return the completed future of the outputs."""
        self.wait()
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self.result())
        return future

    def result(self) -> list[torch.Tensor]:
        """Give the outputs that are still alive, poisoned until somebody has waited."""
        return [t for ref in self._results if (t := ref()) is not None]

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait; there is no stream on CPU that could wait instead."""
        self.wait()

    def is_completed(self) -> bool:
        """Say whether a wait would return at once; if so write the outputs, as a polling loop expects."""
        awaited = self._awaited
        if awaited is not None and not awaited.is_over:
            return False
        self.wait()
        return True

    def is_success(self) -> bool:
        """Say whether the call completed without an error."""
        awaited = self._awaited
        return awaited is None or (awaited.is_over and awaited.error is None)

    def exception(self) -> Any:
        """Give the error that a wait would raise, if it is known."""
        return None if self._awaited is None else self._awaited.error

    def source_rank(self) -> int:
        """Give the group rank that a received message came from."""
        return -1 if self._source is None else self._source

    def _source_rank(self) -> int:
        return self.source_rank()


def poison(call: Call, seed: int) -> None:
    """Overwrite the outputs of a call that is under way with what no engine can mistake for a result."""
    for i, outputs in enumerate(call.outputs):
        spared = _own_piece(call, i)
        for output in outputs:
            # A root, or a rank gathering in place, may go on reading what it gave.
            if spared is None or output.data_ptr() != spared.data_ptr():
                output.fill_(_garbage(output.dtype, seed))


def _own_piece(call: Call, i: int) -> torch.Tensor | None:
    """Give the tensor whose values the call does not change for its caller, should an output alias it."""
    inputs = call.inputs[i] if i < len(call.inputs) else ()
    if not inputs:
        return None
    if call.op is Op.SCATTER:
        return inputs[call.rank]
    return inputs[0] if call.op in {Op.BROADCAST, Op.ALL_GATHER, Op.GATHER} else None


def _garbage(dtype: torch.dtype, seed: int) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype is torch.bool:
        return seed % 2 == 0
    byte = (_GARBAGE_BYTE + seed) % 128
    # The top bit makes it negative where there is a sign, and too large to be an index where there is none.
    return byte - 128 if dtype.is_signed else byte + 128


def _deliver(awaited: Awaited, call: Call) -> None:
    for i, outputs in enumerate(call.outputs):
        if not outputs:
            continue
        sources = awaited.sources(i, call.rank)
        shaped = [s if o.dim() == 1 else s.view(o.shape) for s, o in zip(sources, outputs, strict=True)]
        if len(outputs) == 1:
            outputs[0].copy_(shaped[0])
        else:
            torch._foreach_copy_(outputs, shaped)
