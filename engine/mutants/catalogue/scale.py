"""Mutants whose gradients are a constant factor off, which Adam hides."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant
from engine.plan import Plan

__all__ = ["MUTANTS"]


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="SumsInsteadOfAveraging",
        engine_spec="engine.mutants.scale:SumsInsteadOfAveraging",
        sin="gradients are summed over ranks, not averaged",
        thread="NVIDIA/Megatron-LM#3023",
        kills_on=Condition(because="one rank's sum is its average"),
    ),
    Mutant(
        name="DividesTwice",
        engine_spec="engine.mutants.scale:DividesTwice",
        sin="gradients are divided by the world size a second time",
        thread="pytorch/torchtitan#2318",
        kills_on=Condition(because="dividing by one changes nothing"),
    ),
    Mutant(
        name="IgnoresTheDivideFactor",
        engine_spec="engine.mutants.scale:IgnoresTheDivideFactor",
        sin="gradients are averaged although another divisor was asked for",
        thread="pytorch/torchtitan#1551",
        kills_on=Condition(plan=Plan(divide_factor=1), because="the number of ranks is the divisor anyhow"),
    ),
    Mutant(
        name="DividesByTheFactorTwice",
        engine_spec="engine.mutants.scale:DividesByTheFactorTwice",
        sin="gradients are divided by the square of the divisor asked for",
        thread="pytorch/pytorch#167178",
        kills_on=Condition(world_size=1, plan=Plan(divide_factor=2), because="one is its own square"),
    ),
)
