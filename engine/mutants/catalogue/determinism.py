"""The entries of mutants that do not do the same twice."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant

__all__ = ["MUTANTS"]

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="SumsInAnotherOrderEachTime",
        engine_spec="engine.mutants.determinism:SumsInAnotherOrderEachTime",
        sin="every second run differs by a bit",
        thread="horovod/horovod#1548",
        kills_on=Condition(world_size=1, because="a single run is within rounding"),
    ),
)
