"""The outcome of each rank of a world, and which outcome caused the others.

``host`` is the machine of a rank, empty where all ranks of a world are on the judging machine.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """The rank's body returned ``value`` (Any: the body decides).

    ``digests`` are the SHA-256 of the files that the rank wrote, by name, as it wrote them; older runs have none.
    """

    rank: int
    value: Any
    digests: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """The rank's body raised. ``is_symptom``: another rank's failure can cause this error.

    ``at_s`` is CLOCK_MONOTONIC, which all processes of a machine share.
    """

    rank: int
    kind: str
    message: str
    traceback: str
    is_symptom: bool
    at_s: float
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """The rank's process ended without a report: ``exit_code`` as wait returns it, negative for a signal.

    It is None if the rank was lost with its machine, or with the process that a launcher had started for it. The rank's
    files, including its journal, are then lost too.

    ``is_attributed`` is False if ranks share a process and it is unknown which of them ended it. ``text`` is the last
    output of the dying process, such as a stack. ``is_after_result``: its result had arrived.
    """

    rank: int
    exit_code: int | None
    is_attributed: bool
    text: str
    is_after_result: bool = False
    host: str = ""

    @property
    def how(self) -> str:
        """Format the exit status."""
        if self.exit_code is None:
            return "was lost"
        if self.exit_code >= 0:
            return f"exited with status {self.exit_code}"
        try:
            return f"was killed by {signal.Signals(-self.exit_code).name}"
        except ValueError:
            return f"was killed by signal {-self.exit_code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOut:
    """The rank had not ended at the deadline; ``stack`` is its stack then, ``last_call`` its last collective.

    ``is_after_result``: its result had arrived, and its process did not end. ``thread`` names the thread of the rank
    for which it waited, if there was one, and the stack is then that thread's. ``is_attributed`` is False if ranks
    share a process and it is unknown which of them prevents its end.
    """

    rank: int
    stack: str
    last_call: str
    is_after_result: bool = False
    thread: str = ""
    is_attributed: bool = True
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned:
    """The rank was stopped because of another rank; ``stack`` is its stack then, empty if it could not be read."""

    rank: int
    stack: str = ""
    host: str = ""


Outcome = Returned | Raised | Died | TimedOut | Abandoned


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of a world after its last result: the ranks that ended badly, and the leaked processes."""

    outcomes: Mapping[int, Outcome] = field(default_factory=dict)
    leaks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldResult:
    """One outcome per rank, in rank order; ``leaks`` are processes that a rank left behind (the harness ended them)."""

    outcomes: tuple[Outcome, ...]
    leaks: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Return whether every rank returned and nothing was left behind."""
        return not self.leaks and all(isinstance(o, Returned) for o in self.outcomes)

    def ended_by(self, ending: Ending) -> WorldResult:
        """Return this result with the ending of its world: a rank has ended when its process has."""
        outcomes = tuple(ending.outcomes.get(o.rank, o) for o in self.outcomes)
        return WorldResult(outcomes=outcomes, leaks=(*self.leaks, *ending.leaks))


def causal(result: WorldResult) -> Outcome | None:
    """Return the outcome that explains the others; None when every rank returned.

    A death comes first: peers of a dead rank raise, but a raising rank kills no other. Then the earliest error that is
    not a symptom, then a rank that never ended, then the earliest symptom.
    """
    died = [o for o in result.outcomes if isinstance(o, Died)]
    raised = sorted((o for o in result.outcomes if isinstance(o, Raised)), key=lambda o: o.at_s)
    timed_out = [o for o in result.outcomes if isinstance(o, TimedOut)]
    causes = [o for o in raised if not o.is_symptom]
    first: list[Outcome] = [*sorted(died, key=lambda o: not o.is_attributed), *causes, *timed_out, *raised]
    return first[0] if first else next((o for o in result.outcomes if isinstance(o, Abandoned)), None)
