"""The future of a work on a CPU: complete when it is waited for, and not before, as its work is.

[Note: futures in backward] C++ waits for a future where nothing can see it, and DDP's reducer does so at the end of
backward, or where a hook ends it. So a future that was taken in backward is completed there, after all that backward
computes and before what the reducer has queued for then: as late as can be, in the thread whose result it is. One
that is taken even later, as by DDP for a static graph in its first step, is complete at once: its taker waits without
another word. So is one that C++ takes where no backward is, as DDP does in join. A future that Python takes elsewhere
is complete when it is waited for, or its value is asked for.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardproof.harness.torch_compat.dispatch import Backward, backward_of_thread, call_after_backward
from shardproof.harness.torch_compat.patching import Replacement

_Future = torch.futures.Future
_collect_all = torch.futures.collect_all
_wait_all = torch.futures.wait_all


class LateFuture(_Future[Any]):
    """A future that ``deliver`` completes; a wait calls it."""

    # Any, here and below: a future holds what its callbacks make of the result.
    def __init__(self, deliver: Callable[[LateFuture], None], is_there: Callable[[], bool]) -> None:
        super().__init__()
        self._deliver = deliver
        self._is_there = is_there

    def come(self) -> None:
        """Wait for the work, and complete."""
        if not super().done():
            self._deliver(self)

    def wait(self) -> Any:
        self.come()
        return super().wait()

    def value(self) -> Any:
        """Return the value, for which it waits."""
        self.come()
        return super().value()

    def done(self) -> bool:
        """Return whether a wait would return at once."""
        if not super().done() and self._is_there():
            self.come()
        return super().done()

    def then(self, callback: Callable[[_Future[Any]], Any]) -> _Future[Any]:
        """Return the future of what the callback makes of this one; it comes with this one."""
        later = LateFuture(lambda _: self.come(), self.done)

        def go_on(done: _Future[Any]) -> None:
            try:
                later.set_result(callback(done))
            except Exception as error:  # whatever the callback raises belongs to who waits for it
                later.set_exception(error)

        self.add_done_callback(go_on)
        return later


def late_future(work: dist.Work, value: Callable[[], Any]) -> LateFuture:
    """Return a work's future; ``value`` is read when the work was waited for, as it is when the future is."""

    def deliver(future: LateFuture) -> None:
        work.wait()
        future.set_result(value())

    future = LateFuture(deliver, work.is_completed)
    match backward_of_thread():
        case Backward.COMPUTES:
            _due.futures.append(future)
            call_after_backward(_come_all)
        case Backward.CALLS_BACK:
            future.come()
        # C++ called, not Python.
        case Backward.ABSENT if "get_future" not in sys._getframe(2).f_code.co_names:
            future.come()
    return future


class _Due(threading.local):
    """The futures that this thread's backward has left open."""

    def __init__(self) -> None:
        self.futures: list[LateFuture] = []


_due = _Due()


def _come_all() -> None:
    while _due.futures:
        _due.futures.pop(0).come()


def _functions_that_wait() -> Iterator[tuple[Any, str, Any]]:
    """Yield torch's functions that would block in C++ for late futures, and what lets these come before."""

    def come(futures: Iterable[_Future[Any]]) -> list[_Future[Any]]:
        given = list(futures)
        for future in given:
            if isinstance(future, LateFuture):
                future.come()
        return given

    yield torch.futures, "collect_all", lambda futures: _collect_all(come(futures))
    yield torch.futures, "wait_all", lambda futures: _wait_all(come(futures))
    # Since torch 2.15 a hook amid backward may end it.
    if (end := getattr(DistributedDataParallel, "finalize_backward", None)) is not None:

        def finalize_backward(module: DistributedDataParallel) -> None:
            _come_all()
            end(module)

        yield DistributedDataParallel, "finalize_backward", finalize_backward


late_futures = Replacement(_functions_that_wait)
"""The context in which no function of torch blocks in C++ for a late future of its own thread."""
