"""The entries of mutants that do right by all parameters but one, or by all ranks but one."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant

__all__ = ["MUTANTS"]


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="ForgetsToSynchroniseOneParameter",
        engine_spec="engine.mutants.coverage:ForgetsToSynchroniseOneParameter",
        sin="the last parameter is left out of every reduction",
        thread="pytorch/pytorch#63916",
        kills_on=Condition(because="one rank has nobody to synchronise with"),
    ),
    Mutant(
        name="NeverUpdatesOneParameter",
        engine_spec="engine.mutants.coverage:NeverUpdatesOneParameter",
        sin="the optimizer's update of the last parameter is lost",
        thread="pytorch/pytorch#149205",
        kills_on=Condition(world_size=1),
    ),
    Mutant(
        name="NeverUpdatesTheLastRanksRows",
        engine_spec="engine.mutants.coverage:NeverUpdatesTheLastRanksRows",
        sin="the rows that the last rank owns keep their initial values",
        thread="pytorch/pytorch#176076",
        kills_on=Condition(because="a rank that owns all rows is left in peace"),
    ),
)
