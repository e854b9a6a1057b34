"""Replaces attributes of torch while any rank of this process needs it, and restores them after the last one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

_MISSING = object()


class Replacement:
    """A context that several rank threads may be in at the same time; the first one that enters makes the replacement.

    A replacement finds the rank by its thread.
    """

    # Any: modules and classes, and the types of their attributes.
    def __init__(self, make: Callable[[], Iterable[tuple[Any, str, Any]]]) -> None:
        self._make = make  # called when the first rank enters; returns holders, names and replacements
        self._lock = threading.Lock()
        self._num_users = 0
        self._originals: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> None:
        with self._lock:
            self._num_users += 1
            if self._num_users == 1:
                for holder, name, replacement in list(self._make()):
                    self._originals.append((holder, name, vars(holder).get(name, _MISSING)))
                    setattr(holder, name, replacement)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._num_users -= 1
            while self._originals and not self._num_users:
                holder, name, original = self._originals.pop()
                if original is _MISSING:
                    delattr(holder, name)
                else:
                    setattr(holder, name, original)
