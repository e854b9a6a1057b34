"""The tree of errors: the caller's, the engine's, and the harness's."""

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
    """The caller requested something that does not exist: a misspelt world, a missing run; fix the call."""


class ModelError(UsageError):
    """A user's model cannot be judged; ``got`` says why, and what to try. Mend the model's class."""

    def __str__(self) -> str:
        return f"{self.what}: {self.got}{' ' if self.got.endswith('?') else '; '}{self.hint}"


class NewerSchemaError(UsageError):
    """A later release wrote this run; its lines are complete, but this release cannot interpret them."""


class UnreadableError(UsageError):
    """A file of a run is missing, truncated or damaged; only its content is lost. Run the case again."""

    @property
    def why(self) -> str:
        """The problem and its file, in one line."""
        return " ".join(f"{self.what}: {self.got}".split())


class LostHostError(UsageError):
    """A process that a launcher started has ended, and its rank with it; this session can run no further case."""


class MachineError(ShardproofError):
    """The machine lacks what a world needs; says nothing about the engine. See `shardproof doctor`."""


class ModuleGivenError(ModelError):
    """The name of a model is that of a module, which does not say what data and loss it is trained with."""


class EngineError(ShardproofError):
    """The adapter or engine broke the contract: a missing parameter, a changed name; fix the adapter."""


class HarnessBug(ShardproofError):  # noqa: N818 - "bug" says whose fault it is, which "error" does not
    """The harness is wrong; the verdict is ERRORED and says nothing about the engine. Please report it."""


def _rebuild(kind: type[ShardproofError], what: str, expected: str, got: str, hint: str) -> ShardproofError:
    return kind(what, expected=expected, got=got, hint=hint)


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
