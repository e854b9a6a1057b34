"""Streams and events that record waits; they replace those of a device module such as torch.cpu.

An engine written for accelerators uses ``torch.cpu`` by the same code as ``torch.cuda``: it makes streams, selects
them, records events and has streams wait. On a CPU these calls do nothing, because operators are complete when they
return. But the engine decides which waits to make, and makes the same ones as on a device. On an accelerator whose
streams torch does not trace, all work is then issued to the device's current stream, one operator after the other.

[Note: events of two classes] A ``torch.cuda.Event`` records an event of its own, and not the one of its base class
``torch.Event``, for which streams of ``torch.accelerator`` wait (torch/csrc/cuda/Event.h, torch/csrc/Stream.cpp). So on
CUDA such a stream waits for no event of the device's module, and here it does not either.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any, Self

import torch

from shardproof.harness.torch_compat.dispatch import guards_of_record_stream
from shardproof.harness.torch_compat.patching import Replacement
from shardproof.harness.tracing.races.clock import Clock
from shardproof.harness.tracing.races.detector import DEFAULT, RaceDetector, current_watch

_Stream = torch.cpu.Stream
_Event = torch.cpu.Event


class TrackedStream(_Stream):
    """A stream of the rank that made it; torch's own no-op stream on a thread without a watch."""

    is_of_module = True

    # Any, here and below: torch's stand-ins for streams and events of a CPU are untyped.
    def __init__(
        self, priority: int = -1, *, watch: RaceDetector | None = None, timeline: int | None = None
    ) -> None:
        super().__init__(priority)
        self.watch = watch or current_watch()
        self.timeline = DEFAULT
        if timeline is not None:
            self.timeline = timeline
        elif self.watch is not None:
            self.timeline = self.watch.begin_stream(name_of_variable())
        if self.watch is not None and self.is_of_module:
            self.watch.streams[self.timeline] = self

    def record_event(self, event: Any = None) -> Any:
        """Return an event that fires when all work issued here so far is complete."""
        if self.watch is None:
            return None
        recorded = TrackedEvent() if event is None else event
        recorded.record(self)
        return recorded

    def wait_event(self, event: Any) -> None:
        """Let later work on this stream wait for an event; an event that was never recorded adds no wait."""
        if self.watch is not None and isinstance(event, TrackedEvent) and event.fired is not None:
            self.watch.wait(self.timeline, event.fired)

    def wait_stream(self, stream: Any) -> None:
        """Let later work on this stream wait for all work issued to the other so far."""
        if self.watch is not None and isinstance(stream, TrackedStream) and stream.watch is self.watch:
            self.watch.wait(self.timeline, self.watch.signal(stream.timeline))

    def synchronize(self) -> None:
        """Let the host wait for the stream."""
        if self.watch is not None:
            self.watch.host_waits_for_stream(self.timeline)

    def query(self) -> bool:
        """Return that all work is complete; this orders the host's later work after it."""
        self.synchronize()
        return True


class AcceleratorStream(TrackedStream):
    """A tracking stream with the rest of an accelerator stream's API: a device, and use as a context manager."""

    # Any: an engine passes the arguments of the device's streams; most have no effect here.
    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        super().__init__(priority, **options)
        self.device = device
        self.priority = priority
        self._selections: list[AbstractContextManager[None]] = []

    def selecting(self) -> AbstractContextManager[None]:
        return selection(self)

    def __enter__(self) -> Self:
        self._selections.append(self.selecting())
        self._selections[-1].__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._selections.pop().__exit__(None, None, None)


class GenericStream(AcceleratorStream):
    """A stream of ``torch.accelerator``; see [Note: events of two classes]."""

    is_of_module = False

    def record_event(self, event: Any = None) -> Any:
        return super().record_event(GenericEvent() if event is None else event)

    def wait_event(self, event: Any) -> None:
        """Wait for an event of ``torch.Event``; for one of a device's module there is nothing to wait for."""
        if isinstance(event, GenericEvent):
            super().wait_event(event)


class TrackedEvent(_Event):
    """An event of the rank that records it."""

    def __init__(self, *_: Any, **__: Any) -> None:  # other devices' events have options
        self.fired: Clock | None = None
        self._watch: RaceDetector | None = None

    def record(self, stream: Any = None) -> None:
        """Fire when all work issued on the stream so far is complete; on the current stream if none is given."""
        on = _current_tracked() if stream is None else stream
        if isinstance(on, TrackedStream) and on.watch is not None:
            self._watch, self.fired = on.watch, on.watch.signal(on.timeline)

    def wait(self, stream: Any = None) -> None:
        """Let the stream wait; the current one if none is given."""
        waiting = _current_tracked() if stream is None else stream
        if waiting is not None:
            waiting.wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait for the event."""
        if self._watch is not None and self.fired is not None:
            self._watch.host_waits(self.fired)

    def query(self) -> bool:
        """Return that the event has fired; this orders the host's later work after it."""
        self.synchronize()
        return True


class GenericEvent(TrackedEvent):
    """An event of ``torch.Event``, as a stream of ``torch.accelerator`` records it."""


class selection(AbstractContextManager[None]):  # noqa: N801 - reads as a context manager
    """Makes a stream the calling thread's current one."""

    def __init__(self, stream: TrackedStream) -> None:
        self._stream = stream
        self._outer = DEFAULT

    def __enter__(self) -> None:
        if self._stream.watch is not None:
            self._outer = self._stream.watch.selected
            self._stream.watch.selected = self._stream.timeline

    def __exit__(self, *error: object) -> None:
        if self._stream.watch is not None:
            self._stream.watch.selected = self._outer


def _current_tracked(kind: type[TrackedStream] = TrackedStream) -> Any:
    watch = current_watch()
    if watch is None:
        return None
    if kind is GenericStream:
        return GenericStream(watch=watch, timeline=watch.selected)
    return watch.streams.get(watch.selected) or kind(watch=watch, timeline=watch.selected)


def _selecting(select: Any) -> Any:
    def stream_(stream: Any) -> AbstractContextManager[Any]:
        is_tracked = isinstance(stream, TrackedStream) and stream.watch is not None
        return selection(stream) if is_tracked else select(stream)

    return stream_


def _current_stream_of(kind: type[TrackedStream], current: Any) -> Any:
    def current_stream(device: Any = None) -> Any:
        return _current_tracked(kind) or current(device)

    return current_stream


def _synchronizing(synchronize: Any) -> Any:
    def synchronize_(device: Any = None) -> None:
        watch = current_watch()
        if watch is not None:
            watch.host_waits_for_all()
        synchronize(device)

    return synchronize_


def name_of_variable() -> str:
    """Guess the engine's name for a new stream from the source line that makes it."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        "shardproof.harness.tracing.races"
    ):
        frame = frame.f_back
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    found = re.search(r"(\w+)(?:\"\]|'\])?\s*(?::[^=]+)?=\s", line)
    return found[1].strip("_") if found else ""


# Any: torch's types for streams exclude those of a CPU.
def record_stream_of(record: Any) -> Any:
    """Wrap a function that reports a stream to the allocator so that it reports tracking streams to the watch."""

    def record_stream(tensor: torch.Tensor, stream: Any) -> None:
        if not isinstance(stream, TrackedStream):
            record(tensor, stream)
        elif stream.watch is not None:
            stream.watch.recorded(tensor, stream.timeline)

    return record_stream


@contextmanager
def tracked_streams(device_type: str = "cpu") -> Iterator[None]:
    """Replace a device's streams by tracking streams while any rank of this process is inside."""
    with _in_place(device_type):
        yield


def _replacements(device_type: str) -> Iterator[tuple[Any, str, Any]]:
    module: Any = torch.get_device_module(device_type)
    kind = TrackedStream if device_type == "cpu" else AcceleratorStream
    current_stream = _current_stream_of(kind, module.current_stream)
    yield module, "Stream", kind
    yield module, "Event", TrackedEvent
    yield module, "stream", _selecting(module.stream)
    yield module, "current_stream", current_stream
    yield module, "synchronize", _synchronizing(module.synchronize)
    if device_type != "cpu":
        yield torch.Tensor, "record_stream", record_stream_of(torch.Tensor.record_stream)
    # Not Tensor.record_stream: in torch 2.13 it raises for a CPU stream, with a watch as well.
    for holder, name in guards_of_record_stream() if device_type == "cpu" else ():
        yield holder, name, record_stream_of(vars(holder)[name])
    # If it has an event to wait for, FSDP2 of torch 2.13 asks for the accelerator's stream where it should ask for its
    # device's. All ranks of a process are on one kind of device, so on a CPU too, even if the machine has another.
    generic = _current_stream_of(GenericStream, torch.accelerator.current_stream)
    yield torch.accelerator, "current_stream", generic


@cache
def _in_place(device_type: str) -> Replacement:
    return Replacement(partial(_replacements, device_type))
