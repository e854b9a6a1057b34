"""The entries of mutants that use a value from too early: last step's parameters, or gradients not yet reduced."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant

__all__ = ["MUTANTS"]


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="ComputesWithStaleParameters",
        engine_spec="engine.mutants.staleness:ComputesWithStaleParameters",
        sin="forward and backward use the parameters of the step before",
        thread="NVIDIA/Megatron-LM#663",
        kills_on=Condition(world_size=1, steps=2, because="the first step has no step before it"),
    ),
    Mutant(
        name="StepsBeforeTheReduction",
        engine_spec="engine.mutants.staleness:StepsBeforeTheReduction",
        sin="the optimizer steps before the reduced gradients have arrived",
        thread="pytorch/pytorch#180666",
        kills_on=Condition(because="one rank's gradients are reduced already"),
    ),
)
