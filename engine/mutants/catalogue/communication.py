"""Mutants with right numbers and communication that nobody needs."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant, Trace

__all__ = ["MUTANTS"]


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="GathersOnceMoreInBackward",
        engine_spec="engine.mutants.communication:GathersOnceMoreInBackward",
        sin="backward gathers one unit's parameters once more than it needs them",
        thread="pytorch/pytorch#76553",
        kills_on=Condition(steps=2, because="one rank gathers nothing; counts hold from the second step on"),
        trace=Trace.COMMUNICATION,
    ),
)
