"""What is told of a mutant: its sin, after whom, where it shows, and the least that shows it. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from engine.plan import Plan

__all__ = ["Condition", "Mutant", "Trace"]


class Trace(Enum):
    """Where a sin shows, and the verdicts that show it; a mutant with right numbers escapes every comparison of them.

    Verdicts are spelt, not imported: who is judged knows nothing of the judge.
    """

    NUMBERS = ("gradients, parameters or losses differ from the oracle's", ("FAILED",))
    COMMUNICATION = ("numbers are right, what crosses between ranks is not", ("FAILED",))
    STATE = ("what a rank holds or a module shows is not what the plan says", ("FAILED",))
    RACES = ("numbers are right where operators run one by one; the streams do not order them", ("FAILED",))
    REFUSAL = ("a plan that is not declared is accepted", ("UNSUPPORTED_SILENT",))
    SILENCE = ("training goes on where there is no right way to", ("FAILED",))
    CRASH = ("training raises on some rank", ("CRASHED",))
    HANG = ("ranks wait for each other for ever", ("HUNG",))

    def __init__(self, where: str, verdicts: tuple[str, ...]) -> None:
        self.where = where
        self.verdicts = verdicts

    def is_kill(self, verdict: str) -> bool:
        """Whether this verdict shows the sin; any other that is not conforming caught the mutant by accident."""
        return verdict in self.verdicts


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """The least that makes a sin visible; with anything less the mutant passes, and rightly."""

    world_size: int = 2
    steps: int = 1
    microbatches: int = 1
    plan: Plan = field(default_factory=Plan)
    because: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """An engine wrong on purpose. ``thread`` is the public report of a real engine that sinned alike."""

    name: str
    engine_spec: str
    sin: str
    thread: str
    kills_on: Condition = field(default_factory=Condition)
    trace: Trace = Trace.NUMBERS
