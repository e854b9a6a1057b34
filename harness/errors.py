"""The one tree of errors: the caller's, the engine's, and ours."""

from __future__ import annotations


class ShardproofError(Exception):
    """Root of the tree: *what: expected X, got Y; try Z*."""

    def __init__(self, what: str, *, expected: str, got: str, hint: str) -> None:
        self.what = what
        self.expected = expected
        self.got = got
        self.hint = hint
        super().__init__(what, expected, got, hint)

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the error picklable although its fields are keyword-only."""
        return (_rebuild, (type(self), self.what, self.expected, self.got, self.hint))

    def __str__(self) -> str:
        return f"{self.what}: expected {self.expected}, got {self.got}; try {self.hint}"


class UsageError(ShardproofError):
    """The caller asked for something that is not there: a misspelt world, a missing run; fix the call."""


class NewerSchemaError(UsageError):
    """A later release wrote this run: its lines are whole, and mean what this release does not know."""


class UnreadableError(UsageError):
    """A file of a run is missing, cut off or damaged: what it held is lost, and no more; run the case again."""

    @property
    def why(self) -> str:
        """What is wrong with which file, in one line."""
        return " ".join(f"{self.what}: {self.got}".split())


class LostHostError(UsageError):
    """A process that a launcher started is gone, and its rank with it: no further case can run in this session."""


class EngineError(ShardproofError):
    """The adapter or engine broke the contract: a missing parameter, a changed name; fix the adapter."""


class HarnessBug(ShardproofError):  # noqa: N818 - "bug" says whose fault it is, which "error" does not
    """We are wrong; the verdict is ERRORED and says nothing about the engine. Please report it."""


def _rebuild(kind: type[ShardproofError], what: str, expected: str, got: str, hint: str) -> ShardproofError:
    return kind(what, expected=expected, got=got, hint=hint)
