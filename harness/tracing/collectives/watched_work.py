"""The works that an interceptor returns: they report waits, and stay alive as long as a wait is possible."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardproof.harness.tracing.collectives.futures import late_future

# How many works stay alive after Python has released them: C++ may still hold the pointer of one, and without its
# Python half that work would never complete; torch's own tests keep such works too (pytorch#79176).
_NUM_KEPT = 64

# Any: the value of a future. Called with a work when its future is taken; returns a function that reads the value after
# completion.
Valuer = Callable[[dist.Work], Callable[[], Any]]


class WaitObserver(Protocol):
    """Receives the waits for one call."""

    def waits(self, *, is_over: bool | None) -> None:
        """Record that a wait began or ended; ``is_over`` as in `harness.tracing.ledger.Wait`."""

    def over(self) -> None:
        """Record that the wait returned; a wait that raises is not recorded."""


class WatchedWork(dist.Work):
    """A work that reports to the recorder each wait for it, or for its future, and when that wait returns.

    Without ``valuer`` the future is the backend's own, because a device's future tracks streams; taking it counts as
    waiting.
    """

    def __init__(
        self,
        inner: dist.Work,
        observer: WaitObserver,
        works: Works,
        valuer: Valuer | None,
        outputs: Sequence[torch.Tensor],
    ) -> None:
        super().__init__()
        # C++ may read single-element results of a completed work after Python has released it, as DDP's join in 2.13.
        self._numbers = [*outputs] if sum(t.numel() for t in outputs) == 1 else None
        self._inner = inner
        self._observer = observer
        self._works = works
        self._valuer = valuer
        self._is_over = False
        self._is_taken = False

    def __del__(self) -> None:
        """Stay alive without the tensors after Python's last reference, because C++ may still hold its half."""
        if self._is_over:
            self._inner = _Over()
        self._works.keep(self)

    def let_go(self) -> None:
        """Release the tensors of a device's work whose future was taken, once the device has completed the work."""
        if self._is_taken and self._inner.is_completed():
            self._inner, self._is_taken = _Over(), False

    # Any below: dist.Work's own methods that return tensors are untyped.
    def wait(self, timeout: timedelta | None = None) -> bool:
        self._begin(is_over=False)
        with inside_backend():
            waited = self._inner.wait() if timeout is None else self._inner.wait(timeout)
        self._end()
        return waited

    def get_future(self) -> Any:
        if self._is_over and self._numbers is not None:
            numbers: torch.futures.Future[Any] = torch.futures.Future()
            numbers.set_result(self._numbers)
            return numbers
        if self._valuer is not None:
            future = late_future(self, self._valuer(self._inner))
            if self._is_over:  # its taker has waited, and need not wait again
                future.come()
            return future
        self._begin(is_over=None)
        self._is_taken = True
        own = self._inner.get_future()
        if own.done():
            self._end()
        return own

    def synchronize(self) -> None:
        self._begin(is_over=False)
        with inside_backend():
            self._inner.synchronize()
        self._end()

    def block_current_stream(self) -> None:
        self._begin(is_over=False)
        self._inner.block_current_stream()
        self._end()

    def result(self) -> Any:
        return self._inner.result()

    def is_completed(self) -> bool:
        # A caller that learns that the result is there may use it: this ends a wait like any other.
        is_completed = self._inner.is_completed()
        if is_completed:
            self._begin(is_over=True)
            self._is_over = self._valuer is not None  # streams of a device have yet to wait
        return is_completed

    def is_success(self) -> bool:
        return self._inner.is_success()

    def exception(self) -> Any:
        return self._inner.exception()

    def source_rank(self) -> int:
        return self._inner.source_rank()

    def _source_rank(self) -> int:  # the spelling that torch's own recv from any source uses
        return self._inner._source_rank()

    def _begin(self, *, is_over: bool | None) -> None:
        self._observer.waits(is_over=is_over)
        self._works.waited(self)

    def _end(self) -> None:
        self._observer.over()
        self._is_over = True
        if self._numbers is not None:
            with inside_backend():  # copies that no census counts: the engine may release its own tensors
                self._numbers = [number.detach().clone() for number in self._numbers]


class _Over(dist.Work):
    """The remainder of a completed work that only C++ may still hold: it can be waited for again, and no more."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class Works:
    """Keeps works referenced: all that were not waited for, and the most recent that Python has released."""

    def __init__(self) -> None:
        self._waiting: dict[int, WatchedWork] = {}
        self._kept: deque[WatchedWork] = deque(maxlen=_NUM_KEPT)

    def watch(
        self,
        inner: dist.Work,
        observer: WaitObserver,
        valuer: Valuer | None,
        outputs: Sequence[torch.Tensor] = (),
    ) -> WatchedWork:
        """Return a work that wraps ``inner``, and keep it until it is waited for."""
        if valuer is None:  # on a device, futures are taken before they are complete
            for kept in tuple(self._kept):
                kept.let_go()
        work = WatchedWork(inner, observer, self, valuer, outputs)
        self._waiting[id(work)] = work
        return work

    def waited(self, work: WatchedWork) -> None:
        """Drop the reference to a work; its other holders keep theirs."""
        self._waiting.pop(id(work), None)

    def keep(self, work: WatchedWork) -> None:
        """Keep a work that is being finalized for a while; its finalizer does not run a second time."""
        self._kept.append(work)


class _Own(threading.local):
    """The state of the calling thread."""

    depth = 0


_own = _Own()


class inside_backend:  # noqa: N801 - reads as a context manager
    """Context of a call into a backend: gloo, for example, copies its sums during the wait."""

    __slots__ = ()

    def __enter__(self) -> None:
        _own.depth += 1

    def __exit__(self, *error: object) -> None:
        _own.depth -= 1


def is_inside_backend() -> bool:
    """Return whether the backend is running, to tell its operators from those of the engine."""
    return _own.depth > 0
