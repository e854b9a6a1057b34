"""The watch over one rank's streams on a CUDA device: torch's own trace reports the real ones, and none is replaced.

[Note: where a backend runs] A collective is a timeline of its own here too, from its issue until the wait for it. nccl
runs it on a stream of its group, which waits for the engine's stream when the call is handed over. A stream that later
waits for the group's stream, in Python or C++, has waited for the collective. The group's later collectives start after
it.

[Note: gradients between streams] Autograd runs the backward of an operator on the stream of its forward. Where a
gradient was made on another stream, its engine lets the streams wait, which torch reports, and records the stream with
the allocator, which torch does not report (torch/csrc/autograd/input_buffer.cpp).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardproof.harness.torch_compat.cuda import (
    current_stream_handle,
    is_run_by_autograd,
    reporting_streams,
    stream_handle,
)
from shardproof.harness.torch_compat.patching import Replacement
from shardproof.harness.tracing.collectives.call import Call
from shardproof.harness.tracing.current_rank import current_rank
from shardproof.harness.tracing.operators import RanOperator
from shardproof.harness.tracing.races.clock import Clock
from shardproof.harness.tracing.races.detector import DEFAULT, RaceDetector, current_watch
from shardproof.harness.tracing.races.shadow import is_memory
from shardproof.harness.tracing.races.streams import name_of_variable
from shardproof.harness.tracing.recorder import Recorder


class _InHand(threading.local):
    """The collective that the calling thread is handing over: its group, and what a wait for it orders."""

    collective: tuple[str, Clock] | None = None


class CudaRaceWatch(RaceDetector):
    """One rank's watch. Streams and events are identified by CUDA handles; a stream begins at its first report."""

    device_type = "cuda"

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        # Torch's default stream, or the one of this rank's own where ranks share a process.
        self._timelines = {current_stream_handle(): DEFAULT}
        self._stream_names: dict[int, str] = {}
        self._fired: dict[int, Clock] = {}
        self._stream_of_group: dict[str, int] = {}
        self._in_hand = _InHand()

    @property
    def selected(self) -> int:
        """Return the timeline of the calling thread's current stream."""
        return self.timeline(current_stream_handle())

    @selected.setter
    def selected(self, timeline: int) -> None:
        raise AttributeError("the current stream is torch's own; select one with torch.cuda.stream")

    def timeline(self, stream: int) -> int:
        with self._lock:
            if stream not in self._timelines:
                self._timelines[stream] = self.begin_stream(self._stream_names.get(stream, ""))
            return self._timelines[stream]

    def named(self, stream: int, name: str) -> None:
        """Record the engine's name for a stream before its use; CUDA reuses its streams."""
        with self._lock:
            self._stream_names.setdefault(stream, name)

    # Called by the dispatch mode ------------------------------------------------------------------------------

    def operator(self, ran: RanOperator) -> None:
        """Record an operator; see [Note: gradients between streams]."""
        if self._is_observing or not is_run_by_autograd():
            super().operator(ran)
            return
        with self._lock:
            self._settle()
            for tensor in (t for t in ran.reads if is_memory(t, self.device_type)):
                self._memory.taken_by_autograd(self._storages.key(tensor.untyped_storage()), self.selected)
            super().operator(ran)
            for tensor in (t for t in ran.writes if is_memory(t, self.device_type)):
                self._memory.made_by_autograd(self._storages.key(tensor.untyped_storage()))

    # Called by torch ------------------------------------------------------------------------------------------

    def event_recorded(self, event: int, stream: int) -> None:
        self._fired[event] = self.signal(self.timeline(stream))

    def event_awaited(self, event: int, stream: int) -> None:
        if self._is_observing:
            return
        with self._lock:
            timeline = self.timeline(stream)
            if event in self._fired:
                self.wait(timeline, self._fired[event])
            if self._in_hand.collective is not None and timeline != self.selected:
                group, done = self._in_hand.collective
                self._stream_of_group[group] = timeline
                self.wait(timeline, done)

    def event_ended(self, event: int) -> None:
        self._fired.pop(event, None)

    def host_awaited_event(self, event: int) -> None:
        fired = self._fired.get(event)
        if fired is not None and not self._is_observing:
            self.host_waits(fired)

    def host_awaited_stream(self, stream: int) -> None:
        self.host_waits_for_stream(self.timeline(stream))

    def host_awaited_device(self) -> None:
        self.host_waits_for_all()

    def host_read(self) -> None:
        """Do nothing: to read a number the host waits for a stream, which torch reports."""

    # Called by the interceptor -----------------------------------------------------------------------------

    def issued(self, call: Call, seq: int = -1) -> Clock | None:
        """Record a collective; torch reports the stream that carries it while it is handed over."""
        done = super().issued(call, seq)
        self._in_hand.collective = None if done is None else (call.group_name, done)
        return done

    def handed_over(self) -> None:
        """Record that later waits are the engine's own again."""
        self._in_hand.collective = None

    def _before(self, call: Call) -> Clock:
        before = super()._before(call)
        own_stream = self._stream_of_group.get(call.group_name)
        return before if own_stream is None else before.joined(self._order.clock(own_stream))


@contextmanager
def watched_cuda_streams(recorder: Recorder) -> Iterator[CudaRaceWatch]:
    """Report the calling rank's streams to a watch until exit; the caller sets it for the rank."""
    watch, rank = CudaRaceWatch(recorder), current_rank()
    with reporting_streams(watch, lambda: current_rank() == rank), _in_place:
        yield watch


# Calls that torch's trace omits ---------------------------------------------------------------------------


# Any, here and below: methods of classes that torch types loosely.
def _recording(record: Any) -> Callable[..., None]:
    """Report a stream to the allocator and to the watch."""

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        record(tensor, stream)
        watch = current_watch()
        if isinstance(watch, CudaRaceWatch) and tensor.device.type == watch.device_type:
            watch.recorded(tensor, watch.timeline(stream_handle(stream)))

    return record_stream


def _polling(query: Any, note: Callable[[CudaRaceWatch, Any], None]) -> Callable[[Any], bool]:
    """Record in the watch that an event or a stream has completed, after the host polled it."""

    def query_(event_or_stream: Any) -> bool:
        is_over = bool(query(event_or_stream))
        watch = current_watch()
        if is_over and isinstance(watch, CudaRaceWatch):
            note(watch, event_or_stream)
        return is_over

    return query_


def _naming(make: Any) -> Any:
    """Report the engine's name of a new stream to the watch."""

    def new(kind: Any, *args: Any, **options: Any) -> Any:
        stream = make(kind, *args, **options)
        watch = current_watch()
        if isinstance(watch, CudaRaceWatch) and "stream_id" not in options:  # an existing stream
            watch.named(stream.cuda_stream, name_of_variable())
        return stream

    return staticmethod(new)


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    yield torch.Tensor, "record_stream", _recording(torch.Tensor.record_stream)
    yield torch.cuda.Stream, "__new__", _naming(torch.cuda.Stream.__new__)
    on_stream, on_event = torch.cuda.Stream.query, torch.cuda.Event.query
    yield torch.cuda.Stream, "query", _polling(on_stream, lambda w, s: w.host_awaited_stream(s.cuda_stream))
    yield torch.cuda.Event, "query", _polling(on_event, lambda w, e: w.host_awaited_event(e.cuda_event))


_in_place = Replacement(_replacements)
