"""The rank of the calling thread, where ranks are threads. No torch here."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary


class _Identity(threading.local):
    rank: int | None = None
    is_home: bool = False


_identity = _Identity()
_owners: WeakKeyDictionary[threading.Thread, int] = WeakKeyDictionary()


def bind_rank(rank: int | None) -> None:
    """Bind the calling thread as the one that runs ``rank``'s body; None unbinds it."""
    _identity.rank = rank
    _identity.is_home = rank is not None


def adopt_rank(rank: int) -> None:
    """Bind the calling thread as an additional thread of ``rank``."""
    _identity.rank = rank
    _identity.is_home = False


def current_rank() -> int | None:
    """Return the calling thread's rank; None on a thread that was never bound."""
    return _identity.rank


def is_home_thread() -> bool:
    """Return whether the calling thread runs a rank's body."""
    return _identity.is_home


def own_thread(thread: threading.Thread, rank: int) -> None:
    """Record that ``rank`` started an additional thread."""
    _owners[thread] = rank


def owner_of(thread: threading.Thread) -> int | None:
    """Return the rank that started a thread; None if no rank did, or ranks are processes."""
    return _owners.get(thread)
