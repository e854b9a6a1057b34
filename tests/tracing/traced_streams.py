"""Streams and events on a CPU that torch's trace reports as it reports those of CUDA, with handles for names."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch
from torch.cuda import _gpu_trace as trace

from shardproof import RankContext, Training
from shardproof.harness.tracing.races import cuda_streams as cuda
from shardproof.harness.tracing.recorder import Recorder
from shardproof.harness.training import rank_body
from shardproof.harness.training.watches import Watches, watching

recorded_streams: list[tuple[int, int]] = []
"""Addresses, and handles of the streams that use the memory there."""

_handles = count(1)


class _Current(threading.local):
    """The calling thread's current stream."""

    def __init__(self) -> None:
        self.stream = TracedStream(handle=0)


class TracedStream(torch.cpu.Stream):
    """A stream that completes all work at once."""

    cuda_stream: int

    # Any, here and below: torch leaves its stand-ins for streams and events of a CPU untyped.
    def __new__(cls, priority: int = -1, *, handle: int | None = None) -> Any:
        stream = super().__new__(cls)
        stream.cuda_stream = 1000 + next(_handles) if handle is None else handle
        return stream

    def __init__(self, priority: int = -1, *, handle: int | None = None) -> None:
        super().__init__(priority)

    def record_event(self, event: Any = None) -> Any:
        recorded = TracedEvent() if event is None else event
        recorded.record(self)
        return recorded

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        trace.StreamSynchronizationCallbacks.fire_callbacks(self.cuda_stream)

    def query(self) -> bool:
        return True


class TracedEvent(torch.cpu.Event):
    """An event whose handle a later event reuses, as CUDA's do."""

    _free: list[int] = []  # noqa: RUF012 - shared by all events

    def __init__(self) -> None:
        self.cuda_event = self._free.pop() if self._free else 5000 + next(_handles)

    def __del__(self) -> None:
        trace.EventDeletionCallbacks.fire_callbacks(self.cuda_event)
        self._free.append(self.cuda_event)

    def record(self, stream: Any = None) -> None:
        on = _current.stream if stream is None else stream
        trace.EventRecordCallbacks.fire_callbacks(self.cuda_event, on.cuda_stream)

    def wait(self, stream: Any = None) -> None:
        waiting = _current.stream if stream is None else stream
        trace.EventWaitCallbacks.fire_callbacks(self.cuda_event, waiting.cuda_stream)

    def synchronize(self) -> None:
        trace.EventSynchronizationCallbacks.fire_callbacks(self.cuda_event)

    def query(self) -> bool:
        return True


_current = _Current()


@contextmanager
def _selected(stream: Any) -> Iterator[None]:
    outer, _current.stream = _current.stream, stream
    try:
        yield
    finally:
        _current.stream = outer


def _current_stream(device: Any = None) -> Any:
    return _current.stream


def _synchronize(device: Any = None) -> None:
    trace.DeviceSynchronizationCallbacks.fire_callbacks()


def _taken(tensor: torch.Tensor, stream: Any) -> None:
    recorded_streams.append((tensor.data_ptr(), stream.cuda_stream))


@contextmanager
def traced_device() -> Iterator[None]:
    """Replace torch's streams by traced ones, and let the watch of CUDA read memory of the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (torch.cpu, torch.cuda):
            patch.setattr(module, "Stream", TracedStream)
            patch.setattr(module, "Event", TracedEvent)
            patch.setattr(module, "stream", _selected)
            patch.setattr(module, "current_stream", _current_stream)
            patch.setattr(module, "synchronize", _synchronize)
        patch.setattr(torch.accelerator, "current_stream", _current_stream)
        patch.setattr(torch.Tensor, "record_stream", _taken)
        patch.setattr(cuda.CudaRaceWatch, "device_type", "cpu")
        yield


@contextmanager
def _watching_traced(asked: Any, recorder: Recorder, device_type: str, **options: Any) -> Iterator[Watches]:
    with traced_device(), watching(asked, recorder, "cuda", **options) as watches:
        yield watches


def drive_traced(context: RankContext, training: Training, engine: str) -> str | None:
    """Train under the watch of CUDA, on traced streams; a world's rank body, in a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_body, "watching", _watching_traced)
        return rank_body.drive_rank(context, training, engine)
