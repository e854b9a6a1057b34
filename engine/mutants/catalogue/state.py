"""The entries of mutants whose optimizer loses what it knew."""

from __future__ import annotations

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Layout, Plan

__all__ = ["MUTANTS"]

_STATE = Plan(demands=frozenset({Capability.STATE}))

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="LosesOptimizerState",
        engine_spec="engine.mutants.state:LosesOptimizerState",
        sin="a resumed optimizer starts from nothing",
        thread="facebookresearch/fairscale#601",
        kills_on=Condition(
            world_size=1, steps=2, plan=_STATE, because="before a step there is nothing to lose"
        ),
    ),
    Mutant(
        name="LosesStateOfOtherRanks",
        engine_spec="engine.mutants.state:LosesStateOfOtherRanks",
        sin="a resumed optimizer has the state of the first rank alone",
        thread="facebookresearch/fairscale#601",
        kills_on=Condition(steps=2, plan=_STATE, because="a lone rank is the first"),
    ),
    Mutant(
        name="PermutesOptimizerState",
        engine_spec="engine.mutants.state:PermutesOptimizerState",
        sin="resumed parameters of equal shape have each other's optimizer state",
        thread="pytorch/pytorch#54736",
        kills_on=Condition(
            world_size=1, steps=2, plan=_STATE, because="before a step there is nothing to exchange"
        ),
    ),
    Mutant(
        name="ResetsTheStepCount",
        engine_spec="engine.mutants.state:ResetsTheStepCount",
        sin="a resumed Adam corrects its moments as in the first step",
        thread="databricks/flashoptim#3",
        kills_on=Condition(
            world_size=1,
            steps=2,
            plan=_STATE,
            because="other optimizers do not count, and before a step the count is zero",
        ),
    ),
    Mutant(
        name="StepsOldParametersAfterAResume",
        engine_spec="engine.mutants.state:StepsOldParametersAfterAResume",
        sin="a resumed optimizer holds parameters that are not the model's",
        thread="pytorch/pytorch#149205",
        kills_on=Condition(
            world_size=1, steps=2, plan=_STATE, because="without a resume it holds the right ones"
        ),
    ),
    Mutant(
        name="StartsAdamAtStepOne",
        engine_spec="engine.mutants.state:StartsAdamAtStepOne",
        sin="the optimizer has stepped once before training",
        thread="NVIDIA/Megatron-LM#5974",
        kills_on=Condition(world_size=1, because="an optimizer that does not count cannot show it"),
    ),
    Mutant(
        name="LoadsNoBuffers",
        engine_spec="engine.mutants.state:LoadsNoBuffers",
        sin="a resumed model has the buffers of a fresh one",
        thread="huggingface/accelerate#3898",
        kills_on=Condition(
            world_size=1, steps=2, plan=_STATE, because="before a step buffers are those of a fresh model"
        ),
    ),
    Mutant(
        name="LoadsNoParameters",
        engine_spec="engine.mutants.state:LoadsNoParameters",
        sin="a resumed model has the parameters of a fresh one",
        thread="NVIDIA/Megatron-LM#2769",
        kills_on=Condition(
            world_size=1, steps=2, plan=_STATE, because="before a step parameters are those of a fresh model"
        ),
    ),
    Mutant(
        name="FailsToLoadEmptyShards",
        engine_spec="engine.mutants.state:FailsToLoadEmptyShards",
        sin="a whole state dict cannot be loaded where a rank owns no row of a parameter",
        thread="pytorch/pytorch#136228",
        kills_on=Condition(
            plan=Plan(layout=Layout.SHARD, demands=_STATE.demands),
            because="needs a parameter of fewer rows than ranks, and of two dims",
        ),
        trace=Trace.CRASH,
    ),
)
