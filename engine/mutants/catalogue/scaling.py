"""The entries of mutants whose ranks scale gradients each for itself."""

from __future__ import annotations

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Plan

__all__ = ["MUTANTS"]


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="ScalesAlone",
        engine_spec="engine.mutants.scaling:ScalesAlone",
        sin="a rank alone skips the step in which it saw an infinite gradient",
        thread="pytorch/pytorch#115710",
        kills_on=Condition(
            plan=Plan(demands=frozenset({Capability.WRAPPER})), because="a lone rank has nobody to agree with"
        ),
        trace=Trace.STATE,
    ),
)
