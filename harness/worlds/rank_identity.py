"""Which rank the calling thread is, where ranks are threads. No torch here."""

from __future__ import annotations

import threading

__all__ = ["adopt_rank", "bind_rank", "current_rank", "is_home_thread"]


class _Identity(threading.local):
    rank: int | None = None
    is_home: bool = False


_identity = _Identity()


def bind_rank(rank: int | None) -> None:
    """Make the calling thread the one that runs ``rank``'s body; None makes it nobody's again."""
    _identity.rank = rank
    _identity.is_home = rank is not None


def adopt_rank(rank: int) -> None:
    """Make the calling thread one that ``rank`` started besides its own."""
    _identity.rank = rank
    _identity.is_home = False


def current_rank() -> int | None:
    """Return the calling thread's rank; None on a thread that was never bound."""
    return _identity.rank


def is_home_thread() -> bool:
    """Say whether the calling thread runs a rank's body."""
    return _identity.is_home
