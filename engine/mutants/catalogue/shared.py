"""The entries of mutants that mistake parameters for each other."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Grouping, Plan

__all__ = ["MUTANTS"]


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="UntiesSharedParameters",
        engine_spec="engine.mutants.shared:UntiesSharedParameters",
        sin="each use of a tied parameter gets a copy of its own",
        thread="verl-project/verl#7834",
        kills_on=Condition(world_size=1, because="a parameter with one use stays what it is"),
    ),
    Mutant(
        name="LosesTheLastRowsOfSharedParameters",
        engine_spec="engine.mutants.shared:LosesTheLastRowsOfSharedParameters",
        sin="the last rank's rows of a tied parameter keep their initial values",
        thread="pytorch/pytorch#176076",
        kills_on=Condition(because="a rank that owns all rows is left in peace, and so is what is not tied"),
    ),
    Mutant(
        name="TellsParametersApartByName",
        engine_spec="engine.mutants.shared:TellsParametersApartByName",
        sin="a second model is taken for the first",
        thread="pytorch/pytorch#176225",
        kills_on=Condition(
            world_size=1, because="the first model of a training is the only one of its names"
        ),
        trace=Trace.CRASH,
    ),
    Mutant(
        name="SplitsTiedModules",
        engine_spec="engine.mutants.shared:SplitsTiedModules",
        sin="modules of one group that share a parameter become groups of their own",
        thread="huggingface/accelerate#4171",
        kills_on=Condition(
            plan=Plan(grouping=Grouping.REQUIRED), because="needs a group of modules that are tied"
        ),
        trace=Trace.CRASH,
    ),
)
