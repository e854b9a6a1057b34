"""The entries of mutants whose streams do not wait."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Grouping, Layout, Plan, Reshard

__all__ = ["MUTANTS"]

_UNITS = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
_SHARDED = Plan(layout=Layout.SHARD, units=_UNITS, grouping=Grouping.REQUIRED, reshard=Reshard.AFTER_FORWARD)
_HYBRID = replace(_SHARDED, layout=Layout.HYBRID)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="GathersBeforeTheCopyIn",
        engine_spec="engine.mutants.races:GathersBeforeTheCopyIn",
        sin="the stream that gathers does not wait for the one that fills its input",
        thread="deepspeedai/DeepSpeed#8061",
        kills_on=Condition(plan=_SHARDED),
        trace=Trace.RACES,
    ),
    Mutant(
        name="CopiesOutDuringTheGather",
        engine_spec="engine.mutants.races:CopiesOutDuringTheGather",
        sin="whole parameters are copied out of a gather that may be under way",
        thread="NVIDIA/Megatron-LM#663",
        kills_on=Condition(plan=_SHARDED),
        trace=Trace.RACES,
    ),
    Mutant(
        name="ReducesBeforeGradientsAreThere",
        engine_spec="engine.mutants.races:ReducesBeforeGradientsAreThere",
        sin="the stream that reduces does not wait for that of backward",
        thread="deepspeedai/DeepSpeed#7898",
        kills_on=Condition(plan=_SHARDED),
        trace=Trace.RACES,
    ),
    Mutant(
        name="EndsBackwardWithoutAWait",
        engine_spec="engine.mutants.races:EndsBackwardWithoutAWait",
        sin="the optimizer does not wait for what follows the last reductions",
        thread="flagos-ai/Torch-FL#62",
        kills_on=Condition(
            microbatches=2,
            plan=_SHARDED,
            because="the input of a lone reduction is waited for, and nothing follows it on its stream",
        ),
        trace=Trace.RACES,
    ),
    Mutant(
        name="GathersDuringTheStep",
        engine_spec="engine.mutants.races:GathersDuringTheStep",
        sin="the first copy of an iteration does not wait for the optimizer",
        thread="NVIDIA/Megatron-LM#4609",
        kills_on=Condition(steps=2, plan=_SHARDED, because="nothing is written before the first step"),
        trace=Trace.RACES,
    ),
    Mutant(
        name="ReusesTheReduceInput",
        engine_spec="engine.mutants.races:ReusesTheReduceInput",
        sin="the input of a reduction is let go without a wait when the next one begins",
        thread="deepspeedai/DeepSpeed#7188",
        kills_on=Condition(plan=_SHARDED, because="a single unit has no next one"),
        trace=Trace.RACES,
    ),
    Mutant(
        name="FreesTheReduceInput",
        engine_spec="engine.mutants.races:FreesTheReduceInput",
        sin="the input of a reduction is let go as soon as it was issued",
        thread="deepspeedai/DeepSpeed#7371",
        kills_on=Condition(plan=_SHARDED, because="nothing is computed after the reduction of a single unit"),
        trace=Trace.RACES,
    ),
    Mutant(
        name="FreesTheGatherOutput",
        engine_spec="engine.mutants.races:FreesTheGatherOutput",
        sin="the output of a gather is let go while it may be copied from",
        thread="NVIDIA/Megatron-LM#5788",
        kills_on=Condition(plan=_SHARDED),
        trace=Trace.RACES,
    ),
    Mutant(
        name="ReducesReplicasBeforeTheScatter",
        engine_spec="engine.mutants.races:ReducesReplicasBeforeTheScatter",
        sin="under a hybrid layout replicas do not wait for the reduction within each",
        thread="NVIDIA/Megatron-LM#3670",
        kills_on=Condition(world_size=4, plan=_HYBRID, because="only a hybrid layout has replicas"),
        trace=Trace.RACES,
    ),
    Mutant(
        name="FreesTheReplicasBuffer",
        engine_spec="engine.mutants.races:FreesTheReplicasBuffer",
        sin="what replicas reduce in a dtype of its own is let go as soon as it was issued",
        thread="pytorch/pytorch#180665",
        kills_on=Condition(
            world_size=4,
            plan=replace(_HYBRID, reduce_dtype=torch.bfloat16),
            because="without a dtype of its own it is the gradient, which stays",
        ),
        trace=Trace.RACES,
    ),
    Mutant(
        name="GathersPartsBeforeTheyAreCut",
        engine_spec="engine.mutants.races:GathersPartsBeforeTheyAreCut",
        sin="what is kept for pairs of ranks is gathered without a wait for its copy",
        thread="deepspeedai/DeepSpeed#8061",
        kills_on=Condition(
            world_size=4,
            plan=replace(_SHARDED, reshard=Reshard.TO_PAIRS),
            because="other policies copy nothing",
        ),
        trace=Trace.RACES,
    ),
    Mutant(
        name="ReducesBeforeTheCut",
        engine_spec="engine.mutants.reference_races:ReducesBeforeTheCut",
        sin="the reference engine reduces gradients without a wait for their layout",
        thread="deepspeedai/DeepSpeed#7898",
        kills_on=Condition(plan=_SHARDED),
        trace=Trace.RACES,
    ),
    Mutant(
        name="GathersWhileTheStepWrites",
        engine_spec="engine.mutants.reference_races:GathersWhileTheStepWrites",
        sin="the reference engine begins an iteration without a wait for the optimizer",
        thread="NVIDIA/Megatron-LM#663",
        kills_on=Condition(steps=2, plan=_SHARDED, because="nothing is written before the first step"),
        trace=Trace.RACES,
    ),
    Mutant(
        name="FreesTheCopiedBuffer",
        engine_spec="engine.mutants.reference_races:FreesTheCopiedBuffer",
        sin="the reference engine lets go of a gather's buffer without a wait for the copy out of it",
        thread="NVIDIA/Megatron-LM#5788",
        kills_on=Condition(plan=_SHARDED),
        trace=Trace.RACES,
    ),
    Mutant(
        name="RefillsTheReduceInput",
        engine_spec="engine.mutants.reference_races:RefillsTheReduceInput",
        sin="the reference engine lets go of a reduction's input without a wait",
        thread="deepspeedai/DeepSpeed#7188",
        kills_on=Condition(plan=_SHARDED, because="a single unit has no next one"),
        trace=Trace.RACES,
    ),
    Mutant(
        name="StepsWhileGradientsAreReduced",
        engine_spec="engine.mutants.reference_races:StepsWhileGradientsAreReduced",
        sin="the reference engine ends backward without a wait for its reductions",
        thread="flagos-ai/Torch-FL#62",
        kills_on=Condition(plan=_SHARDED),
        trace=Trace.RACES,
    ),
)
