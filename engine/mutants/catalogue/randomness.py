"""The entries of mutants whose ranks do not run the same model, or draw other random numbers than they should."""

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
    Mutant(
        name="DrawsAlikeOnAllRanks",
        engine_spec="engine.mutants.randomness:DrawsAlikeOnAllRanks",
        sin="all ranks draw the same random numbers in forward",
        thread="radixark/miles#3187",
        kills_on=Condition(because="models that draw nothing are right"),
    ),
    Mutant(
        name="RecomputesWithOtherDraws",
        engine_spec="engine.mutants.randomness:RecomputesWithOtherDraws",
        sin="a recomputation draws other random numbers than its forward",
        thread="allenai/OLMo-core#828",
        kills_on=Condition(world_size=1, because="models that draw nothing are right"),
    ),
)
