"""The entries of mutants that mistake parameters too small to cut."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant

__all__ = ["MUTANTS"]

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="GivesSmallParametersNoGradient",
        engine_spec="engine.mutants.shapes:GivesSmallParametersNoGradient",
        sin="the gradient of a parameter of one element is zero",
        thread="pytorch/pytorch#144045",
        kills_on=Condition(world_size=1, because="larger parameters are right"),
    ),
    Mutant(
        name="ForgetsScalars",
        engine_spec="engine.mutants.shapes:ForgetsScalars",
        sin="parameters of no dim are left out of every reduction",
        thread="deepspeedai/DeepSpeed#202",
        kills_on=Condition(because="a lone rank has nobody to reduce with"),
    ),
    Mutant(
        name="MistakesTheNeighbourOfAnEmptyParameter",
        engine_spec="engine.mutants.shapes:MistakesTheNeighbourOfAnEmptyParameter",
        sin="the parameter after an empty one is left out of every reduction",
        thread="deepspeedai/DeepSpeed#8279",
        kills_on=Condition(because="a lone rank has nobody to reduce with"),
    ),
)
