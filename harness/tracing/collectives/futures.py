"""The future of a work on a CPU: like its work, it completes when it is waited for, and not before.

[Note: futures in backward] C++ waits for a future where Python cannot see it. DDP's reducer does so at the end of
backward, or where a hook ends it. So a future that was taken in backward is completed there, after all computation of
that backward and before the callbacks that the reducer has queued. This is as late as possible, on the thread that
needs the result. A future that is taken even later, as by DDP for a static graph in its first step, completes at once,
because its taker waits without another call. So does a future that C++ takes outside of backward, as DDP does in join,
and one that a hook takes there for a rank that has no batches left: C++ hands the rank a future of its own for it.
A future that Python takes elsewhere completes when it is waited for, or when its value is read.
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
from shardproof.harness.torch_compat.private_names import optional

_FOLLOW = "torch.nn.parallel:DistributedDataParallel._match_all_reduce_for_bwd_pass"
_Future = torch.futures.Future
_collect_all = torch.futures.collect_all
_wait_all = torch.futures.wait_all


class LateFuture(_Future[Any]):
    """A future that ``deliver`` completes; a wait calls ``deliver``."""

    # Any, here and below: a callback may turn the result into any type.
    def __init__(self, deliver: Callable[[LateFuture], None], is_there: Callable[[], bool]) -> None:
        super().__init__()
        self._deliver = deliver
        self._is_there = is_there

    def come(self) -> None:
        """Wait for the work, and complete the future."""
        if not super().done():
            self._deliver(self)

    def wait(self) -> Any:
        self.come()
        return super().wait()

    def value(self) -> Any:
        """Wait, and return the value."""
        self.come()
        return super().value()

    def done(self) -> bool:
        """Return whether a wait would return at once."""
        if not super().done() and self._is_there():
            self.come()
        return super().done()

    def then(self, callback: Callable[[_Future[Any]], Any]) -> _Future[Any]:
        """Return a future of the callback's result; it completes together with this one."""
        later = LateFuture(lambda _: self.come(), self.done)

        def go_on(done: _Future[Any]) -> None:
            try:
                later.set_result(callback(done))
            except Exception as error:  # the exception is raised where the future is waited for
                later.set_exception(error)

        self.add_done_callback(go_on)
        return later


def late_future(work: dist.Work, value: Callable[[], Any]) -> LateFuture:
    """Return a work's future; ``value`` is called after the wait for the work, in the wait for the future."""

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
        # The caller is C++, not Python.
        case Backward.ABSENT if _due.in_join or "get_future" not in sys._getframe(2).f_code.co_names:
            future.come()
    return future


class _Due(threading.local):
    """The futures of this thread's backward that are still open."""

    def __init__(self) -> None:
        self.futures: list[LateFuture] = []
        self.in_join = False  # whether a rank without batches runs the hooks of the others


_due = _Due()


def _come_all() -> None:
    while _due.futures:
        _due.futures.pop(0).come()


def _functions_that_wait() -> Iterator[tuple[Any, str, Any]]:
    """Yield torch's functions that would block in C++ on late futures, with wrappers that complete these first."""

    def come(futures: Iterable[_Future[Any]]) -> list[_Future[Any]]:
        given = list(futures)
        for future in given:
            if isinstance(future, LateFuture):
                future.come()
        return given

    yield torch.futures, "collect_all", lambda futures: _collect_all(come(futures))
    yield torch.futures, "wait_all", lambda futures: _wait_all(come(futures))
    if (follow := optional(_FOLLOW)) is not None:

        def follow_others(module: DistributedDataParallel) -> None:
            _due.in_join = True
            try:
                follow(module)
            finally:
                _due.in_join = False

        yield DistributedDataParallel, _FOLLOW.rpartition(".")[2], follow_others
    # Since torch 2.15 a hook in the middle of backward may end it (pytorch#196651).
    if (end := getattr(DistributedDataParallel, "finalize_backward", None)) is not None:

        def finalize_backward(module: DistributedDataParallel) -> None:
            _come_all()
            end(module)

        yield DistributedDataParallel, "finalize_backward", finalize_backward


late_futures = Replacement(_functions_that_wait)
"""The context in which no function of torch blocks in C++ for a late future of its own thread."""
