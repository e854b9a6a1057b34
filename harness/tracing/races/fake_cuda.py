"""A stand-in for torch.cuda on a machine without it, for engines that require CUDA; installed only on request.

Such an engine makes streams and events, queries the current device and its memory, and moves tensors to "cuda". Here
streams and events are tracking ones, so that a watch sees them. Memory queries return that no memory is used. Tensors
that are moved to "cuda" stay on the CPU. Queries of torch itself get true answers, because torch would call a device.

[Note: what a stand-in cannot show] Kernels, graphs, pools, copies between host and device and the real order of streams
are absent. The stand-in checks the engine's logic and the waits that it makes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch

from shardproof.harness.torch_compat.patching import Replacement
from shardproof.harness.tracing.races.detector import current_watch
from shardproof.harness.tracing.races.streams import (
    AcceleratorStream,
    TrackedEvent,
    record_stream_of,
    selection,
)

_CPU = torch.device("cpu")
# These modules ask about the device of this machine, not about the engine's.
_TRUTH = ("torch.", "shardproof.harness.")


class CudaStream(AcceleratorStream):
    """A tracking stream with the rest of a CUDA stream's API; without a watch it tracks nothing."""

    # Any, here and below: an engine passes the arguments of torch.cuda; most have no effect here.
    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        super().__init__(_CPU, priority, **options)

    @property
    def cuda_stream(self) -> int:
        return self.timeline

    stream_id = cuda_stream

    def record_event(self, event: Any = None) -> Any:
        """Return an event, with or without a watch."""
        recorded = CudaEvent() if event is None else event
        recorded.record(self)
        return recorded

    def selecting(self) -> AbstractContextManager[None]:
        """Return the context that selects this stream, with or without a watch."""
        return _stream(self)


class CudaEvent(TrackedEvent):
    """A tracking event whose elapsed times are all zero."""

    def elapsed_time(self, end: CudaEvent) -> float:
        """Return 0 milliseconds."""
        return 0.0


class _Unwatched(threading.local):
    """The current stream of a thread whose rank has no watch."""

    def __init__(self) -> None:
        self.current = CudaStream()


_unwatched = _Unwatched()


@contextmanager
def _selected(stream: CudaStream) -> Iterator[None]:
    outer, _unwatched.current = _unwatched.current, stream
    try:
        yield
    finally:
        _unwatched.current = outer


def _stream(stream: Any) -> AbstractContextManager[Any]:
    if stream is None:
        return nullcontext()
    return _selected(stream) if stream.watch is None else selection(stream)


def _set_stream(stream: CudaStream) -> None:
    if stream.watch is None:
        _unwatched.current = stream
    else:
        stream.watch.selected = stream.timeline


def _current_stream(device: Any = None) -> Any:
    watch = current_watch()
    return _unwatched.current if watch is None else _of_timeline(watch.selected)


def _default_stream(device: Any = None) -> Any:
    return _of_timeline(0) if current_watch() is not None else _Unwatched().current


def _of_timeline(timeline: int) -> Any:
    watch = current_watch()
    assert watch is not None
    known = watch.streams.get(timeline)
    # The same rank may have used a stream of torch.cpu before.
    return known if isinstance(known, CudaStream) else CudaStream(watch=watch, timeline=timeline)


def _synchronize(device: Any = None) -> None:
    watch = current_watch()
    if watch is not None:
        watch.host_waits_for_all()


def _is_there() -> bool:
    """Return True to an engine, and False to torch and the harness: whether there is a device."""
    name: str = sys._getframe(1).f_globals.get("__name__", "")
    return not f"{name}.".startswith(_TRUTH)


# Functions that make or move tensors, by name. A torch mode would catch more, but not in hooks of backward.
_MAKERS = (
    *(
        "arange",
        "as_tensor",
        "empty",
        "eye",
        "full",
        "linspace",
        "ones",
        "rand",
        "randint",
        "randn",
        "tensor",
    ),
    *("zeros", "empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like"),
)
_MOVERS = ("to", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")


def _on_the_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that takes a device so that CUDA tensors stay on the CPU."""

    @wraps(function)
    def elsewhere(*args: Any, **named: Any) -> Any:
        named = {name: _placed(value) for name, value in named.items()}
        if isinstance(named.get("device"), int):  # the number of a CUDA device, as `current_device` returns
            named["device"] = _CPU
        return function(*map(_placed, args), **named)

    return elsewhere


def _stays(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


def _placed(value: Any) -> Any:
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    return _CPU if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _zero(*_: Any, **__: Any) -> int:
    return 0


def _one(*_: Any, **__: Any) -> int:
    return 1


def _properties(device: Any = None) -> Any:
    return SimpleNamespace(name=_name(), major=9, minor=0, total_memory=_BYTES, multi_processor_count=1)


def _name(device: Any = None) -> str:
    return "a stand-in"


def _capability(device: Any = None) -> tuple[int, int]:
    return (9, 0)


def _free_and_all(device: Any = None) -> tuple[int, int]:
    return (_BYTES, _BYTES)


_BYTES = 2**34  # enough for every case
_STAND_INS: Mapping[str, Any] = {
    "Stream": CudaStream,
    "Event": CudaEvent,
    "stream": _stream,
    "set_stream": _set_stream,
    "current_stream": _current_stream,
    "default_stream": _default_stream,
    "synchronize": _synchronize,
    "is_available": _is_there,
    "device": lambda _: nullcontext(),
    "current_device": _zero,
    "set_device": _nothing,
    "device_count": _one,
    "get_device_capability": _capability,
    "get_device_name": _name,
    "get_device_properties": _properties,
    "mem_get_info": _free_and_all,
    "empty_cache": _nothing,
    "reset_peak_memory_stats": _nothing,
    "memory_stats": lambda *_, **__: {},
    **dict.fromkeys(
        (
            "memory_allocated",
            "memory_reserved",
            "max_memory_allocated",
            "max_memory_reserved",
        ),
        _zero,
    ),
}


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    yield from ((torch.cuda, name, stand_in) for name, stand_in in _STAND_INS.items())
    yield from ((torch.cuda.nvtx, name, _nothing) for name in ("range_push", "range_pop", "mark"))
    yield torch.Tensor, "record_stream", record_stream_of(torch.Tensor.record_stream)
    yield torch.Tensor, "cuda", _stays
    yield from ((torch, name, _on_the_cpu(getattr(torch, name))) for name in _MAKERS)
    yield from ((torch.Tensor, name, _on_the_cpu(getattr(torch.Tensor, name))) for name in _MOVERS)


_in_place = Replacement(_replacements)


@contextmanager
def cuda_stand_in() -> Iterator[None]:
    """Replace torch.cuda by a stand-in in this process until exit; inside `watching` where both are wanted."""
    with _in_place:
        yield
