"""The entries of mutants that divide by something else, or elsewhere, in some layouts, units or dtypes."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Layout, Plan, Wire

__all__ = ["MUTANTS"]


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="AveragesWhateverTheFactor",
        engine_spec="engine.mutants.division:AveragesWhateverTheFactor",
        sin="in every layout gradients are averaged although another divisor was asked for",
        thread="deepspeedai/DeepSpeed#5618",
        kills_on=Condition(plan=Plan(divide_factor=1), because="the number of ranks is the divisor anyhow"),
    ),
    Mutant(
        name="DividesByTheSquareOfTheFactor",
        engine_spec="engine.mutants.division:DividesByTheSquareOfTheFactor",
        sin="in every layout gradients are divided by the divisor asked for twice",
        thread="pytorch/pytorch#167178",
        kills_on=Condition(world_size=1, plan=Plan(divide_factor=2), because="one is its own square"),
    ),
    Mutant(
        name="IgnoresTheDivideFactorOfOneRank",
        engine_spec="engine.mutants.division:IgnoresTheDivideFactorOfOneRank",
        sin="a rank that is alone does not divide although a divisor was asked for",
        thread="pytorch/pytorch#167178",
        kills_on=Condition(world_size=1, plan=Plan(divide_factor=2), because="several ranks divide as asked"),
    ),
    Mutant(
        name="HalvesOneUnit",
        engine_spec="engine.mutants.division:HalvesOneUnit",
        sin="the gradients of the first unit are half of what they should be",
        thread="pytorch/pytorch#160285",
        kills_on=Condition(world_size=1),
    ),
    Mutant(
        name="AveragesOnTheWire",
        engine_spec="engine.mutants.division:AveragesOnTheWire",
        sin="averages cross between ranks although sums alone were asked for",
        thread="pytorch/torchtitan#1551",
        kills_on=Condition(steps=2, plan=Plan(wire=Wire.SUM), because="one rank sends nothing"),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="AveragesReplicasOnTheWire",
        engine_spec="engine.mutants.division:AveragesReplicasOnTheWire",
        sin="under a hybrid layout averages cross between replicas although sums alone were asked for",
        thread="pytorch/torchtitan#2318",
        kills_on=Condition(
            steps=2,
            plan=Plan(layout=Layout.HYBRID, wire=Wire.SUM),
            because="only a hybrid layout has replicas",
        ),
        trace=Trace.COMMUNICATION,
    ),
)
