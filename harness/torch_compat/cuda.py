"""CUDA stream events from torch's internal trace, on which torch's own sanitizer is built.

The trace reports every record of an event, every wait and every synchronization, from Python and from C++, such as
autograd's waits between streams and NCCL's groups. Streams and events are identified by their handles, as numbers.
Without CUDA there are no reports. See ``torch.cuda._gpu_trace`` and ``torch.cuda._sanitizer``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import torch

from shardproof.harness.torch_compat.dispatch import is_raw
from shardproof.harness.torch_compat.private_names import private

_OF_MODES = ("shardproof.harness.", "torch._dynamo", "torch._compile", "torch.utils._python_dispatch")


class StreamListener(Protocol):
    """Receives the handles of streams and events, on the thread that uses them."""

    def event_recorded(self, event: int, stream: int) -> None:
        """Record that an event was recorded on a stream."""

    def event_awaited(self, event: int, stream: int) -> None:
        """Record that later work on a stream waits for an event."""

    def event_ended(self, event: int) -> None:
        """Record that an event was destroyed; another event may reuse its handle."""

    def host_awaited_event(self, event: int) -> None:
        """Record that the host waited for an event."""

    def host_awaited_stream(self, stream: int) -> None:
        """Record that the host waited for all work on a stream."""

    def host_awaited_device(self) -> None:
        """Record that the host waited for the device."""


class _Listener:
    """A registered listener, the threads that it listens to, and the first error that it raised."""

    def __init__(self, listener: StreamListener, is_heard: Callable[[], bool]) -> None:
        self._listener = listener
        self.is_heard = is_heard
        self.failure: Exception | None = None

    def notify(self, method: str, handles: tuple[int, ...]) -> None:
        try:
            getattr(self._listener, method)(*handles)
        except Exception as error:  # torch would log it and continue, and races would be missed
            self.failure = self.failure or error


_listeners: list[_Listener] = []


# Any: the handles that torch passes.
def _forwarding(method: str) -> Callable[..., None]:
    def forward(*handles: Any) -> None:
        if is_raw():
            return  # the harness's own transport, in the place of a backend
        for listener in tuple(_listeners):
            if listener.is_heard():
                listener.notify(method, handles)

    return forward


def _ended(event: int) -> None:
    """Notify all listeners: any thread may end an event, and an event of another rank may have its handle next."""
    for listener in tuple(_listeners):
        listener.notify("event_ended", (event,))


_is_registered = False


def _register_callbacks() -> None:
    """Register torch's callbacks, once per process: they cannot be removed."""
    global _is_registered
    if _is_registered:
        return
    _is_registered = True
    activate, trace = private("torch._C:_activate_gpu_trace"), private("torch.cuda._gpu_trace")
    trace.register_callback_for_event_record(_forwarding("event_recorded"))
    trace.register_callback_for_event_wait(_forwarding("event_awaited"))
    trace.register_callback_for_event_deletion(_ended)
    trace.register_callback_for_event_synchronization(_forwarding("host_awaited_event"))
    trace.register_callback_for_stream_synchronization(_forwarding("host_awaited_stream"))
    trace.register_callback_for_device_synchronization(_forwarding("host_awaited_device"))
    activate()


@contextmanager
def reporting_streams(listener: StreamListener, is_heard: Callable[[], bool]) -> Iterator[None]:
    """Report what threads do with streams to a listener until exit, which raises the listener's first exception.

    A thread is reported while ``is_heard`` is true on it: the threads of other ranks may share the process.
    """
    _register_callbacks()
    registered = _Listener(listener, is_heard)
    _listeners.append(registered)
    try:
        yield
    finally:
        _listeners.remove(registered)
    if registered.failure is not None:
        raise registered.failure


def is_run_by_autograd() -> bool:
    """Return whether autograd's engine runs the operator that a dispatch mode sees now, and no Python code does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OF_MODES):
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


def current_stream_handle() -> int:
    """Return the handle of the calling thread's current stream on its current device."""
    return stream_handle(torch.cuda.current_stream())


# Any: torch.cuda's streams, or those of torch.accelerator, which have no public handle.
def stream_handle(stream: Any) -> int:
    """Return the handle of a stream."""
    if not hasattr(stream, "cuda_stream"):
        make: Any = torch.cuda.Stream  # which torch leaves untyped
        stream = make(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )
    return int(stream.cuda_stream)
