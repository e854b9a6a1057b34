"""Ctrl-C: the first one ends the run in good order, with its reports; the second ends the process at once.

A launcher that ends its processes sends SIGTERM, also after Ctrl-C: it counts as a first one, never as a second.

A process that ends at once leaves no process behind: the reaper of its fork server ends all of its descendants, and
xdist's workers end with the process that started them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class _Interrupts:
    """The handler of SIGINT, which can be deferred during a write."""

    def __init__(self) -> None:
        self.num_seen = 0
        self.num_holds = 0

    def take(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and self.num_seen:
            return
        self.num_seen += 1
        if self.num_seen > 1:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)  # a shell sees the signal; no exit hook runs
        elif not self.num_holds:
            raise KeyboardInterrupt


_handlers: list[_Interrupts] = []  # at most one; none if Python's own handler is unchanged


@contextlib.contextmanager
def interruptible(*, or_terminated: bool = False) -> Iterator[None]:
    """Handle SIGINT, and SIGTERM too on request; only in the main thread, and only in the outermost call."""
    if _handlers or threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = _Interrupts()
    numbers = (signal.SIGINT, signal.SIGTERM) if or_terminated else (signal.SIGINT,)
    before = [(number, signal.signal(number, handler.take)) for number in numbers]
    _handlers.append(handler)
    try:
        yield
    finally:
        _handlers.clear()
        for number, action in before:
            signal.signal(number, action)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Finish the block before a first SIGINT is raised; a second one still ends the process."""
    if not _handlers or threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = _handlers[0]
    num_seen = handler.num_seen
    handler.num_holds += 1
    try:
        yield
    finally:
        handler.num_holds -= 1
    if handler.num_seen > num_seen and not handler.num_holds:
        raise KeyboardInterrupt
