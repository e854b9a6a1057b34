"""What units of one tree share to communicate: streams, buffers to reuse, and the reductions in flight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["InFlight", "Lanes", "Reduction"]

# More buffers than these are not kept from reuse: the current stream waits for the oldest instead.
_MOST_HELD = 3


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """A collective that was issued, and the buffer that it still reads or writes."""

    work: dist.Work
    buffer: torch.Tensor


Reduction = Iterator[InFlight]
"""A reduction on its way: each item is a collective to wait for before the next step can be taken."""


class Lanes:
    """Three streams beside the current one, and the reductions that run on two of them.

    [Note: two ways to overlap] On an accelerator a wait holds up a stream and not the thread, so a reduction
    is issued to its end at once. On a CPU a wait holds up the thread: a reduction stops where it would wait
    and is taken up again at the next unit's backward, when its collective has had a unit's compute to finish.
    """

    def __init__(self, device: torch.device) -> None:
        # Any: torch types the streams of each device module apart.
        self._module: Any = torch.get_device_module(device.type)
        self._waits_hold_up_the_thread = device.type == "cpu"
        self._gather_stream = self._module.Stream(priority=-1)
        self._scatter_stream = self._module.Stream(priority=-1)
        self._all_reduce_stream = self._module.Stream()
        self._reductions: list[Reduction] = []
        self._held: list[tuple[torch.Tensor, Any]] = []
        self._spare: torch.Tensor | None = None

    # Gathers ----------------------------------------------------------------------------------------------

    def gathering(self) -> AbstractContextManager[Any]:
        """Issue what follows on the gather stream."""
        return self._on(self._gather_stream)

    def gather_after(self, event: Any | None = None) -> None:
        """Hold up later gathers until ``event``, or until all that is issued on the current stream so far."""
        if event is None:
            self._gather_stream.wait_stream(self._module.current_stream())
        else:
            self._gather_stream.wait_event(event)

    def buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Give a 1-D buffer for a gather, the one given back last if it fits."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.dtype == dtype and numel <= spare.numel() <= numel + numel // 8:
            return spare[:numel]
        return torch.empty(numel, dtype=dtype, device=device)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take a gather's buffer back once the current stream has read it."""
        self.gather_after()
        if self._waits_hold_up_the_thread:  # an accelerator's allocator does this itself
            self._spare = buffer

    def forget_buffer(self) -> None:
        """Free the buffer that was given back, if no prefetch has taken it: an idle one would be at the peak."""
        self._spare = None

    # Reductions -------------------------------------------------------------------------------------------

    def reduce(self, reduction: Reduction) -> None:
        """Start a reduction; the one started before it takes its next step first."""
        self.advance()
        self._let_go()
        self._scatter_stream.wait_stream(self._module.current_stream())
        with self._on(self._scatter_stream):
            started = next(reduction, None)
        if started is None:
            return
        self._reductions.append(self._after(started, reduction))
        if not self._waits_hold_up_the_thread:
            self._all_reduce_stream.wait_stream(self._scatter_stream)
            self._finish_all()

    def advance(self) -> None:
        """Let every reduction in flight wait for its collective and issue the next one."""
        self._reductions = [r for r in self._reductions if self._step(r)]

    def finish(self) -> None:
        """Wait for every reduction: after this the current stream may read all reduced gradients."""
        self._finish_all()
        current = self._module.current_stream()
        current.wait_stream(self._scatter_stream)
        current.wait_stream(self._all_reduce_stream)
        self._held.clear()

    def _finish_all(self) -> None:
        while self._reductions:
            self.advance()

    def _step(self, reduction: Reduction) -> bool:
        with self._on(self._all_reduce_stream):
            return next(reduction, None) is not None

    def _after(self, in_flight: InFlight | None, reduction: Reduction) -> Reduction:
        """Wait for a collective, and for each later one when the next step is asked for."""
        while in_flight is not None:
            in_flight.work.wait()
            if not self._waits_hold_up_the_thread:
                # The allocator would hand the buffer to the stream that made it, which has not waited.
                event = self._module.current_stream().record_event()
                self._held.append((in_flight.buffer, event))
            in_flight = next(reduction, None)
            if in_flight is not None:
                yield in_flight

    def _let_go(self) -> None:
        """Drop the buffers whose collectives are over, or that are too many."""
        self._held = [(b, event) for b, event in self._held if not event.query()]
        while len(self._held) > _MOST_HELD:
            _, event = self._held.pop(0)
            self._module.current_stream().wait_event(event)

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context
