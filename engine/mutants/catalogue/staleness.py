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
    Mutant(
        name="AddsGradientsToParameters",
        engine_spec="engine.mutants.staleness:AddsGradientsToParameters",
        sin="from the second step on gradients are added to the parameters",
        thread="NVIDIA/Megatron-LM#4609",
        kills_on=Condition(world_size=1, steps=2, because="the first step begins with an empty buffer"),
    ),
    Mutant(
        name="RepeatsTheSecondGradients",
        engine_spec="engine.mutants.staleness:RepeatsTheSecondGradients",
        sin="from the third step on the optimizer is given the gradients of the second",
        thread="pytorch/pytorch#43307",
        kills_on=Condition(world_size=1, steps=3, because="two steps are right"),
    ),
    Mutant(
        name="KeepsOneOldGradient",
        engine_spec="engine.mutants.staleness:KeepsOneOldGradient",
        sin="clearing the gradients does not reach that of the last parameter",
        thread="pytorch/pytorch#94258",
        kills_on=Condition(world_size=1, steps=2, because="before the first step there is nothing to clear"),
    ),
)
