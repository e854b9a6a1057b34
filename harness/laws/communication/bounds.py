"""Shared parts of the laws over ledgers: expected numbers (exact or bounded), and the iteration over all ranks.

[Note: a blind law] A law that finds no entry where there should be some has proven nothing, so it fails. In a world of
several ranks this holds for a rank without any entry of its training, and for a selection that covers no step or
microbatch of the schedule. A world of one rank need not communicate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardproof.harness.cases.training import Training
from shardproof.harness.laws.communication.select import (
    NOTHING_OBSERVED,
    LoopStep,
    Per,
    Select,
    shows_nothing,
)
from shardproof.harness.laws.law import Evidence
from shardproof.harness.tracing.ledger import Entry, Ledger


class Formula(Protocol):
    """A closed form over the training and the world size; a small frozen value, so that laws stay values."""

    @property
    def name(self) -> str:
        """Format the formula, such as ``number of units + 1``."""

    def __call__(self, training: Training, world_size: int) -> int:
        """Compute it."""


Amount = int | Formula


def evaluate(amount: Amount, training: Training, world_size: int) -> int:
    """Return the number, computing it if it is a formula."""
    return amount if isinstance(amount, int) else amount(training, world_size)


@dataclass(frozen=True, slots=True)  # positional: `Exactly(2)` reads aloud
class Exactly:
    """Exactly this number."""

    amount: Amount

    def allows(self, got: int, training: Training, world_size: int) -> bool:
        """Return whether ``got`` is as expected."""
        return got == evaluate(self.amount, training, world_size)

    def spell(self, training: Training, world_size: int) -> str:
        """Format the expectation with its numbers."""
        return _spell(self.amount, training, world_size)

    def __str__(self) -> str:
        return f"exactly {_name(self.amount)}"


@dataclass(frozen=True, slots=True)  # positional: `Between(1, 3)` reads aloud
class Between:
    """Any number from low to high, both included."""

    low: Amount
    high: Amount

    def allows(self, got: int, training: Training, world_size: int) -> bool:
        """Return whether ``got`` is as expected."""
        low, high = (evaluate(a, training, world_size) for a in (self.low, self.high))
        return low <= got <= high

    def spell(self, training: Training, world_size: int) -> str:
        """Format the expectation with its numbers."""
        return " to ".join(_spell(a, training, world_size) for a in (self.low, self.high))

    def __str__(self) -> str:
        return f"{_name(self.low)} to {_name(self.high)}"


Bound = Exactly | Between


def _name(amount: Amount) -> str:
    return str(amount) if isinstance(amount, int) else amount.name


def _spell(amount: Amount, training: Training, world_size: int) -> str:
    number = evaluate(amount, training, world_size)
    return str(number) if isinstance(amount, int) else f"{number} ({amount.name})"


def blindness(evidence: Evidence, selects: Sequence[Select], per: Per) -> list[str]:
    """Return why a law could not have failed, if that is so; see [Note: a blind law]."""
    schedule = evidence.training.schedule
    broken = [
        f"expected a {per.value} to look at, got none: {select} of {schedule.steps} step(s) with "
        f"{schedule.microbatches} microbatch(es); try a longer schedule"
        for select in selects
        if not select.moments(schedule, per)
    ]
    if evidence.world_size > 1:
        silent = [rank for rank, ledger in ledgers(evidence) if shows_nothing(ledger)]
        broken += [f"rank {rank}: {NOTHING_OBSERVED}" for rank in silent]
    return broken


def ledgers(evidence: Evidence) -> Iterator[tuple[int, Ledger]]:
    """Yield each rank with its ledger."""
    for observation in evidence.ranks:
        yield observation.rank, observation.ledger


def pick(select: Select, ledger: Ledger, evidence: Evidence) -> Ledger:
    """Return the entries that a selection picks, in order of issue."""
    return select.pick(ledger, evidence.training.schedule)


def at(moment: LoopStep, entries: Ledger) -> Ledger:
    """Return the entries issued at that moment."""
    return tuple(e for e in entries if moment.holds(e))


def when(entry: Entry) -> str:
    """Format the moment of an entry."""
    return str(LoopStep(step=entry.step, microbatch=None if entry.microbatch < 0 else entry.microbatch))
