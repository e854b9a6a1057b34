"""Mutants whose ranks do not run the same model."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant

__all__ = ["MUTANTS"]


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="DropsAUnitOnTheLastRank",
        engine_spec="engine.mutants.randomness:DropsAUnitOnTheLastRank",
        sin="the last rank alone drops the output of one unit",
        thread="pytorch/pytorch#158719",
        kills_on=Condition(because="a lone rank drops nothing"),
    ),
)
