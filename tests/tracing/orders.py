"""Waits that order two streams, and calls that do not, through the interface of streams of every device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

# Any: torch.cpu or torch.cuda, its current stream and another one, none of which has a type in common.
Ordering = Callable[[Any, Any, Any], object]


def _recorded(device: Any, stream: Any) -> Any:
    event = device.Event()
    event.record(stream)
    return event


def _waits_when_selected(device: Any, here: Any, there: Any) -> None:
    event = here.record_event()
    with device.stream(there):
        event.wait()


ORDERS: Mapping[str, Ordering] = {
    "wait-stream": lambda device, here, there: there.wait_stream(here),
    "wait-event": lambda device, here, there: there.wait_event(here.record_event()),
    "event-passed": lambda device, here, there: there.wait_event(here.record_event(device.Event())),
    "event-records": lambda device, here, there: there.wait_event(_recorded(device, here)),
    "event-records-current": lambda device, here, there: there.wait_event(_recorded(device, None)),
    "event-waits": lambda device, here, there: here.record_event().wait(there),
    "event-waits-current": _waits_when_selected,
    "event-synchronize": lambda device, here, there: here.record_event().synchronize(),
    "event-query": lambda device, here, there: here.record_event().query(),
    "stream-synchronize": lambda device, here, there: here.synchronize(),
    "stream-query": lambda device, here, there: here.query(),
    "device-synchronize": lambda device, here, there: device.synchronize(),
}
"""Each orders later work of ``there`` after earlier work of ``here``."""

NO_ORDERS: Mapping[str, Ordering] = {
    "nothing": lambda device, here, there: None,
    "the-other-way": lambda device, here, there: here.wait_stream(there),
    "for-itself": lambda device, here, there: there.wait_event(there.record_event()),
    "for-nothing": lambda device, here, there: there.wait_event(device.Event()),
    "for-a-third": lambda device, here, there: there.wait_stream(device.Stream()),
    "its-own-synchronize": lambda device, here, there: there.synchronize(),
    "its-own-query": lambda device, here, there: there.record_event().query(),
    "unrecorded-synchronize": lambda device, here, there: device.Event().synchronize(),
}
"""None orders later work of ``there`` after earlier work of ``here``."""


def write_here_read_there(device: Any, order: Ordering) -> None:
    """Write on the current stream, let ``order`` do something with that and another one, read on the other."""
    side, tensor = device.Stream(), torch.ones(4)
    tensor.add_(1)
    order(device, device.current_stream(), side)
    with device.stream(side):
        tensor.sum()
