"""How each rank of a world ended, and which end caused the others.

``host`` is the machine of a rank, empty where all ranks of a world are on the machine that judges.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """The rank's body came to its end; ``value`` is what it returned (Any: the body decides).

    ``digests`` are the SHA-256 of the files that the rank wrote, by name, as it wrote them; older runs have none.
    """

    rank: int
    value: Any
    digests: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """The rank's body raised. ``is_symptom``: the error is one that another rank's failure brings about.

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
    """The rank's process ended without a word: ``exit_code`` as wait reports it, negative for a signal.

    It is None where the rank was lost with its machine, or with the process that a launcher had started for it. What
    the rank wrote, its journal included, is then lost too.

    ``is_attributed`` is False where ranks share a process and it is unknown which of them ended it.
    ``text`` is what the dying process could still say, such as a stack. ``is_after_result``: its result had come.
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
    """The rank had not ended at the deadline; ``stack`` is where it was, ``last_call`` its last collective.

    ``is_after_result``: its result had come, and its process did not end; ``thread`` names the thread of the rank
    that it waited for, if there was one, and the stack is then that thread's. ``is_attributed`` is False where ranks
    share a process and it is unknown which of them holds it up.
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
    """The rank was stopped because of another rank; ``stack`` is where it was, empty if it could not be asked."""

    rank: int
    stack: str = ""
    host: str = ""


Outcome = Returned | Raised | Died | TimedOut | Abandoned


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a world ended after its last result: the ranks that ended badly, and what was left behind."""

    outcomes: Mapping[int, Outcome] = field(default_factory=dict)
    leaks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldResult:
    """One outcome per rank, in rank order; ``leaks`` are processes that a rank left behind (and we ended)."""

    outcomes: tuple[Outcome, ...]
    leaks: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Whether every rank returned and nothing was left behind."""
        return not self.leaks and all(isinstance(o, Returned) for o in self.outcomes)

    def ended_by(self, ending: Ending) -> WorldResult:
        """Return this result with what its world's end adds: a rank has ended when its process has."""
        outcomes = tuple(ending.outcomes.get(o.rank, o) for o in self.outcomes)
        return WorldResult(outcomes=outcomes, leaks=(*self.leaks, *ending.leaks))


def causal(result: WorldResult) -> Outcome | None:
    """Pick the outcome that explains the others; None when every rank returned.

    A death comes first: peers of a dead rank raise, a raising rank kills no other. Then the earliest error
    that is not a symptom, then a rank that never ended, then the earliest symptom.
    """
    died = [o for o in result.outcomes if isinstance(o, Died)]
    raised = sorted((o for o in result.outcomes if isinstance(o, Raised)), key=lambda o: o.at_s)
    timed_out = [o for o in result.outcomes if isinstance(o, TimedOut)]
    causes = [o for o in raised if not o.is_symptom]
    first: list[Outcome] = [*sorted(died, key=lambda o: not o.is_attributed), *causes, *timed_out, *raised]
    return first[0] if first else next((o for o in result.outcomes if isinstance(o, Abandoned)), None)
