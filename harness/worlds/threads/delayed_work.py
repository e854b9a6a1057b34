"""The work of one call: its outputs hold poison until the rank waits, then the result."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardproof.harness.torch_compat.dispatch import copy_all, raw_access
from shardproof.harness.tracing.collectives.call import Call
from shardproof.harness.worlds.threads.buffer_guard import BufferGuard, is_freed
from shardproof.harness.worlds.threads.rendezvous import PendingOp, PostedReceive


@dataclass(slots=True)
class Delay:
    """How late the result of a collective is that all ranks have joined.

    ``num_calls``: after so many further calls of its rank it is written, wait or no wait; None: not before the
    wait. ``num_polls``: so often asking whether it is complete is answered with no.
    """

    num_calls: int | None = None
    num_polls: int = 0


class WorkOwner(Protocol):
    """Owns works: has their ranks wait, and receives what becomes of them."""

    def block(self, awaited: PendingOp, call: Call, timeout_s: float | None) -> None:
        """Return once ``awaited`` is complete; raises its error, a timeout, or the world's end."""

    def give_way(self) -> None:
        """Let other ranks run: this one asks over and over."""

    def delivered(self, work: DelayedWork, guard: BufferGuard | None) -> None:
        """Record that a result is about to be written; the guard of an asynchronous call's buffers ends."""


class DelayedWork(dist.Work):
    """One rank's part in something awaited; results are written by the rank's own thread, when it waits.

    Or earlier, where its delay says so.
    """

    def __init__(
        self, call: Call, awaited: PendingOp, owner: WorkOwner, guard: BufferGuard | None, delay: Delay
    ) -> None:
        super().__init__()
        self._pending: Call | None = call  # None once delivered, so that the tensors can go
        self._awaited: PendingOp | None = awaited
        self._owner = owner
        self._guard = guard
        self._delay = delay
        self._delivering = threading.RLock()
        # Weak: a work that is still referenced must not keep the tensors that the engine has let go of.
        self._results = [weakref.ref(t) for part in call.outputs for t in part]
        self._source = call.peer

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until all ranks have joined, then write the outputs; only the first wait does anything."""
        # C++ spells "no timeout of its own" as zero.
        limit_s = timeout.total_seconds() if timeout else None
        with self._delivering:
            call, awaited = self._pending, self._awaited
            if call is None:
                return True
            if awaited is not None:
                self._owner.block(awaited, call, limit_s or call.timeout_s)
                if isinstance(awaited, PostedReceive):
                    self._source = awaited.source
                with raw_access():
                    self._owner.delivered(self, self._guard)
                    _deliver(awaited, call)
            self._pending = self._awaited = self._guard = None
        return True

    @property
    def pending(self) -> Call | None:
        """The call, until its result was written."""
        return self._pending

    def pass_call(self) -> None:
        """Note that the rank makes another call: the result comes now, if it is as late as it shall be."""
        if self._delay.num_calls is None or self._awaited is None or not self._awaited.is_over:
            return
        self._delay.num_calls -= 1
        if self._delay.num_calls < 0 and self._awaited.error is None:
            self.wait()

    def get_future(self) -> Any:  # Any: torch.futures.Future over a list of tensors
        """Wait, and return the completed future of the outputs."""
        outputs = self.result()
        self.wait()
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(outputs)
        return future

    def result(self) -> list[torch.Tensor]:
        """Return the outputs that are still alive, poisoned until the wait."""
        return [t for ref in self._results if (t := ref()) is not None]

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        """Wait; there is no stream on CPU that could wait instead."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether a wait would return at once; if so write the outputs, as a polling loop expects."""
        awaited = self._awaited
        is_over = awaited is None or awaited.is_over
        if is_over and (awaited is None or self._delay.num_polls <= 0):
            self.wait()
            return True
        self._delay.num_polls -= is_over
        self._owner.give_way()
        return False

    def is_success(self) -> bool:
        """Return whether the call completed without an error."""
        awaited = self._awaited
        return awaited is None or (awaited.is_over and awaited.error is None)

    def exception(self) -> Any:
        """Return the error that a wait would raise, if it is known."""
        return None if self._awaited is None else self._awaited.error

    def source_rank(self) -> int:
        """Return the group rank that a received message came from."""
        return -1 if self._source is None else self._source

    def _source_rank(self) -> int:
        return self.source_rank()


def _deliver(awaited: PendingOp, call: Call) -> None:
    for i, outputs in enumerate(call.outputs):
        if not outputs or any(
            map(is_freed, outputs)
        ):  # to write there would end the process; the guard reports it
            continue
        sources = awaited.sources(i, call.rank)
        shaped = [s if o.dim() == 1 else s.view(o.shape) for s, o in zip(sources, outputs, strict=True)]
        copy_all(outputs, shaped)
