"""Communication that the states below one root share: streams, buffers to reuse, and the reductions in flight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True, eq=False)
class PendingCollective:
    """An issued collective, and the memory that it uses."""

    work: dist.Work
    output: torch.Tensor


Reduction = Iterator[PendingCollective]
"""A reduction in flight: each item is a collective to wait for before the next step."""


class GradientReductionHandle:
    """The reductions that finalizing backward has issued; gradients are ready after a wait."""

    def __init__(self, comm_ctx: CommContext | None, owner: object = None) -> None:
        self.owner = owner  # the root state that issued them, because others may share the context
        self._comm_ctx = comm_ctx
        self._is_void = False

    def wait(self) -> None:
        """Wait until the current stream can read the gradients; a second call does nothing.

        Raises RuntimeError after a reset, which drops them.
        """
        if self._is_void:
            raise RuntimeError(
                "GradientReductionHandle.wait: expected reductions under way, got a module that was reset since; "
                "run the iteration again"
            )
        if self._comm_ctx is not None:
            self._comm_ctx.finish()
            self._comm_ctx.unfinished = None
            self._comm_ctx = None

    def void(self) -> None:
        """Forget the reductions after a reset has dropped them."""
        self._is_void = True


class CommContext:
    """Three streams beside the current one, with reductions on two of them.

    [Note: two ways to overlap] On an accelerator a wait blocks a stream and not the thread, so a reduction
    is issued to its end at once. On a CPU a wait blocks the thread: a reduction stops where it would wait and
    resumes at the next unit's backward, after one unit's compute time for its collective.
    """

    most_in_flight: int
    """How many reductions may hold their input at once; more of them take more memory and overlap more."""

    waits_hold_up_the_thread: bool
    """Which of the two ways to use. The accelerator's way works on a CPU too, but without overlap."""

    def __init__(self, device: torch.device) -> None:
        self.most_in_flight = 1
        self.unfinished: GradientReductionHandle | None = None
        # Any: torch has a type of stream for each device module.
        self._module: Any = torch.get_device_module(device.type)
        self.waits_hold_up_the_thread = device.type == "cpu"
        self._gather_stream = self._module.Stream(priority=-1)
        self._scatter_stream = self._module.Stream(priority=-1)
        self._all_reduce_stream = self._module.Stream()
        self._reductions: list[Reduction] = []
        self._inputs: list[tuple[torch.Tensor, Any]] = []
        self._outputs: list[tuple[list[torch.Tensor], Any]] = []
        # Memory of their last collectives, for the next ones; idle memory adds to the peak.
        self._spare_output: torch.Tensor | None = None  # of a gather
        self._spare_input: torch.Tensor | None = None  # of a reduction

    # Gathers ----------------------------------------------------------------------------------------------

    def on_all_gather_stream(self) -> AbstractContextManager[Any]:
        """Return a context that issues work on the gather stream."""
        return self._on(self._gather_stream)

    def order_all_gathers(self, event: Any | None = None) -> None:
        """Make later gathers start after ``event``, or after all work issued so far on the current stream."""
        if event is None:
            self._gather_stream.wait_stream(self._module.current_stream())
        else:
            self._gather_stream.wait_event(event)

    def all_gather_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a 1-D buffer for a gather: the last recycled one if it fits."""
        spare, self._spare_output = self._spare_output, None
        return _fitting(spare, numel, dtype, device)

    def recycle(self, buffer: torch.Tensor) -> None:
        """Take back a gather's buffer after the current stream has read it."""
        if self.waits_hold_up_the_thread:  # an accelerator's allocator reuses memory itself
            self._spare_output = buffer

    def free_buffers(self) -> None:
        """Free the recycled buffers that no collective has taken."""
        self._spare_output = self._spare_input = None

    # Reductions -------------------------------------------------------------------------------------------

    def reserve(self) -> None:
        """Advance earlier reductions until a new one may allocate memory; see ``most_in_flight``."""
        if self.waits_hold_up_the_thread:
            if len(self._reductions) >= self.most_in_flight:
                self.advance()
            return
        # A CPU's streams may have no events: there is nothing to wait for.
        self._outputs = [
            (buffers, event) for buffers, event in self._outputs if event is not None and not event.query()
        ]
        while len(self._inputs) >= self.most_in_flight:
            _, event = self._inputs.pop(0)
            self._module.current_stream().wait_event(event)

    def reduction_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a 1-D buffer for the input of a reduction: that of one which has read it, if it fits."""
        spare, self._spare_input = self._spare_input, None
        return _fitting(spare, numel, dtype, device)

    def reduce(self, flat: torch.Tensor, reduction: Reduction) -> None:
        """Start a reduction of ``flat``, which the current stream has filled."""
        self._scatter_stream.wait_stream(self._module.current_stream())
        with self._on(self._scatter_stream):
            first = next(reduction, None)
        if not self.waits_hold_up_the_thread:
            self._issue_all(flat, first, reduction)
        elif first is not None:
            self._reductions.append(self._resumed(flat, first, reduction))

    def check_finished(self, what: str) -> None:
        """Raise RuntimeError while an asynchronous finalization has not been waited for."""
        if self.unfinished is not None:
            raise RuntimeError(
                f"{what}: expected no finalization of backward under way, got one that was not waited for; "
                "call wait() of what finalize_backward(async_op=True) returned"
            )

    def advance(self) -> None:
        """Make every reduction in flight wait for its collective and issue the next one."""
        self._reductions = [r for r in self._reductions if next(r, None) is not None]

    def finish(self) -> None:
        """Wait for every reduction; the current stream can then read all reduced gradients."""
        while self._reductions:
            self.advance()
        current = self._module.current_stream()
        current.wait_stream(self._scatter_stream)
        current.wait_stream(self._all_reduce_stream)
        self._inputs.clear()
        self._outputs.clear()
        self.free_buffers()

    def _resumed(self, flat: torch.Tensor, first: PendingCollective, reduction: Reduction) -> Reduction:
        """Wait for a collective, and for each later one when the next step is requested."""
        first.work.wait()
        if first.output is not flat:
            self._spare_input = flat
        del flat, first
        while (in_flight := next(reduction, None)) is not None:
            yield in_flight
            in_flight.work.wait()

    def _issue_all(
        self, flat: torch.Tensor, in_flight: PendingCollective | None, reduction: Reduction
    ) -> None:
        # An allocator returns freed memory to the stream that allocated it, and only this event shows when
        # the streams here no longer use it.
        outputs = []
        self._all_reduce_stream.wait_stream(self._scatter_stream)
        with self._on(self._all_reduce_stream):
            if in_flight is not None:
                in_flight.work.wait()
            self._inputs.append((flat, self._all_reduce_stream.record_event()))
            while in_flight is not None:
                outputs.append(in_flight.output)
                in_flight = next(reduction, None)
                if in_flight is not None:
                    in_flight.work.wait()
            self._outputs.append((outputs, self._all_reduce_stream.record_event()))

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context


def _fitting(
    spare: torch.Tensor | None, numel: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    if spare is not None and spare.dtype == dtype and spare.numel() == numel:
        return spare
    return torch.empty(numel, dtype=dtype, device=device)
