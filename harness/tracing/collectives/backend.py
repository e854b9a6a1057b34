"""Whether the calling thread is inside of a backend, whose own operators are no engine's."""

from __future__ import annotations

import threading

__all__ = ["inside_backend", "is_inside_backend"]


class _Own(threading.local):
    """The calling thread's."""

    depth = 0


_own = _Own()


class inside_backend:  # noqa: N801 - reads as the context that it is
    """Context of a call into a backend: gloo, for one, copies what it has summed up while somebody waits for it."""

    __slots__ = ()

    def __enter__(self) -> None:
        _own.depth += 1

    def __exit__(self, *error: object) -> None:
        _own.depth -= 1


def is_inside_backend() -> bool:
    """Tell an operator that a backend calls from those of the engine."""
    return _own.depth > 0
