"""The work of one call: its outputs contain poison until the rank waits, then the result."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardproof.harness.torch_compat.accelerators import await_moment, moment_of, used_here
from shardproof.harness.torch_compat.dispatch import copy_all, hide_from_dynamo, raw_access
from shardproof.harness.tracing.collectives.call import Call
from shardproof.harness.worlds.threads.buffer_guard import BufferGuard, is_freed
from shardproof.harness.worlds.threads.rendezvous import PendingOp, PostedReceive


@dataclass(slots=True)
class Delay:
    """How late the result of a collective is after all ranks have joined.

    ``num_calls`` is the number of further calls of its rank after which the result is written, even without a wait;
    None: not before the wait. ``num_polls`` is the number of polls for completion that return False.
    """

    num_calls: int | None = None
    num_polls: int = 0


class WorkOwner(Protocol):
    """Owns works: makes their ranks wait, and receives their results."""

    def block(self, awaited: PendingOp, call: Call, timeout_s: float | None) -> None:
        """Return once ``awaited`` is complete; raises its error, a timeout, or the world's end."""

    def give_way(self) -> None:
        """Let other ranks run, because this one polls."""

    def delivered(self, work: DelayedWork, guard: BufferGuard | None) -> None:
        """Record that a result is about to be written; the guard of an asynchronous call's buffers ends."""


class DelayedWork(dist.Work):
    """One rank's part in an awaited operation; the rank's own thread writes the results when it waits.

    Its delay may write them earlier.
    """

    def __init__(
        self, call: Call, awaited: PendingOp, owner: WorkOwner, guard: BufferGuard | None, delay: Delay
    ) -> None:
        super().__init__()
        self._pending: Call | None = call  # None once delivered, so that the tensors can be freed
        self._awaited: PendingOp | None = awaited
        self._owner = owner
        self._guard = guard
        self._delay = delay
        self._delivering = threading.RLock()
        # Weak: a work that is still referenced must not keep tensors alive that the engine has released.
        self._results = [weakref.ref(t) for part in call.outputs for t in part]
        self._source = call.peer
        self._device = call.device
        self._issued = moment_of(call.device)  # after the poison

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until all ranks have joined, then write the outputs; only the first wait does anything."""
        # C++ passes zero for "no timeout of its own".
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
                    await_moment(call.device, self._issued)
                    await_moment(call.device, awaited.moment)
                    self._owner.delivered(self, self._guard)
                    _deliver(awaited, call)
            self._pending = self._awaited = self._guard = None
        return True

    @property
    def pending(self) -> Call | None:
        """The call, until its result was written."""
        return self._pending

    def pass_call(self) -> None:
        """Record that the rank makes another call: the result is written now, if its delay is over."""
        if self._delay.num_calls is None or self._awaited is None or not self._awaited.is_over:
            return
        self._delay.num_calls -= 1
        if self._delay.num_calls < 0 and self._awaited.error is None:
            self.wait()

    def get_future(self) -> Any:  # Any: torch.futures.Future over a list of tensors
        """Wait, and return the completed future of the outputs."""
        outputs = self.result()
        self.wait()
        # C++ that waits for a future joins the streams of its devices.
        devices: list[int | str | torch.device] = [] if self._device.type == "cpu" else [self._device]
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices)
        future.set_result(outputs)
        return future

    def result(self) -> list[torch.Tensor]:
        """Return the outputs that are still alive, poisoned until the wait."""
        return [t for ref in self._results if (t := ref()) is not None]

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        """Wait: the result is copied by the caller's stream, which waits for it; on a CPU there is none."""
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
        """Return the group rank of a received message's sender."""
        return -1 if self._source is None else self._source

    def _source_rank(self) -> int:
        return self.source_rank()


# A step of the user's that torch (2.13) compiles reaches it through C++: its checks of memory cannot be traced.
hide_from_dynamo(DelayedWork.wait)


def _deliver(awaited: PendingOp, call: Call) -> None:
    for i, outputs in enumerate(call.outputs):
        if not outputs or any(
            map(is_freed, outputs)
        ):  # to write there would end the process; the guard reports it
            continue
        sources = awaited.sources(i, call.rank)
        used_here(sources)
        shaped = [s if o.dim() == 1 else s.view(o.shape) for s, o in zip(sources, outputs, strict=True)]
        copy_all(outputs, shaped)
