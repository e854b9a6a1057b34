"""What a collective of the threads world may end in, other than its result."""

from __future__ import annotations

from shardproof.harness.errors import EngineError


class CollectiveError(EngineError):
    """A collective cannot be carried out; compare the calls that the text names."""


class CollectiveMismatchError(CollectiveError):
    """Ranks called different collectives as one and the same, or with sizes that do not fit together."""


class CollectiveRefusedError(CollectiveError):
    """A collective that has no meaning, or that no CPU backend carries; use another reduce op or dtype."""


class CollectiveTimeoutError(CollectiveError):
    """A rank did not come to a collective within the group's own timeout."""


class DeadlockError(CollectiveError):
    """Every rank that has not returned waits for another one; look at what each of them waits for."""


class WorldAbandonedError(BaseException):
    """Another rank failed, so this one stops; no Exception, so that an engine's ``except`` lets it pass."""
