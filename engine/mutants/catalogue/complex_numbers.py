"""The entries of mutants that lose parts of complex numbers."""

from __future__ import annotations

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant
from engine.plan import Plan

__all__ = ["MUTANTS"]

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="DropsImaginaryParts",
        engine_spec="engine.mutants.complex_numbers:DropsImaginaryParts",
        sin="imaginary parts of gradients are zero",
        thread="pytorch/pytorch#158753",
        kills_on=Condition(
            world_size=1,
            plan=Plan(demands=frozenset({Capability.COMPLEX})),
            because="models of real numbers have none",
        ),
    ),
)
