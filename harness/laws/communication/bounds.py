"""The number a law expects: exact or between bounds, plain or computed from the training and the world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from harness.cases.training import Training

__all__ = ["Amount", "Between", "Exactly", "Expectation", "Formula", "evaluate"]


class Formula(Protocol):
    """A closed form over the training and the world size; a small frozen value, so that laws stay values."""

    @property
    def name(self) -> str:
        """Spell the formula, such as ``number of units + 1``."""

    def __call__(self, training: Training, world_size: int) -> int:
        """Compute it."""


Amount = int | Formula


def evaluate(amount: Amount, training: Training, world_size: int) -> int:
    """Give the number, computing it if it is a formula."""
    return amount if isinstance(amount, int) else amount(training, world_size)


@dataclass(frozen=True, slots=True)  # positional: `Exactly(2)` reads aloud
class Exactly:
    """This number and no other."""

    amount: Amount

    def allows(self, got: int, training: Training, world_size: int) -> bool:
        """Tell whether ``got`` is as expected."""
        return got == evaluate(self.amount, training, world_size)

    def spell(self, training: Training, world_size: int) -> str:
        """Spell the expectation with its numbers."""
        return _spell(self.amount, training, world_size)

    def __str__(self) -> str:
        return f"exactly {_name(self.amount)}"


@dataclass(frozen=True, slots=True)  # positional: `Between(1, 3)` reads aloud
class Between:
    """Any number from low to high, both included."""

    low: Amount
    high: Amount

    def allows(self, got: int, training: Training, world_size: int) -> bool:
        """Tell whether ``got`` is as expected."""
        low, high = (evaluate(a, training, world_size) for a in (self.low, self.high))
        return low <= got <= high

    def spell(self, training: Training, world_size: int) -> str:
        """Spell the expectation with its numbers."""
        return " to ".join(_spell(a, training, world_size) for a in (self.low, self.high))

    def __str__(self) -> str:
        return f"{_name(self.low)} to {_name(self.high)}"


Expectation = Exactly | Between


def _name(amount: Amount) -> str:
    return str(amount) if isinstance(amount, int) else amount.name


def _spell(amount: Amount, training: Training, world_size: int) -> str:
    number = evaluate(amount, training, world_size)
    return str(number) if isinstance(amount, int) else f"{number} ({amount.name})"
