"""The errors of a collective of the threads world."""

from __future__ import annotations

from shardproof.harness.errors import EngineError


class CollectiveError(EngineError):
    """A collective cannot be carried out; compare the calls that the text names."""


class CollectiveMismatchError(CollectiveError):
    """Ranks called different collectives as if they were one, or with sizes that do not fit together."""


class CollectiveRefusedError(CollectiveError):
    """A collective that has no meaning, or that no CPU backend supports; use another reduce op or dtype."""


class CollectiveTimeoutError(CollectiveError):
    """A rank did not arrive at a collective within the group's own timeout."""


class DeadlockError(CollectiveError):
    """Every rank that has not returned waits for another one; compare the waits of all ranks."""


class WorldAbandonedError(BaseException):
    """Another rank failed, so this one stops; not an Exception, so that an engine's ``except`` does not catch it."""
