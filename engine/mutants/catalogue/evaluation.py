"""The entries of mutants that are wrong in evaluation alone."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant

__all__ = ["MUTANTS"]

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="EvaluatesWithStaleParameters",
        engine_spec="engine.mutants.evaluation:EvaluatesWithStaleParameters",
        sin="evaluation uses the parameters of the step before",
        thread="NVIDIA/Megatron-LM#663",
        kills_on=Condition(world_size=1, steps=2, because="the first step has no step before it"),
    ),
)
