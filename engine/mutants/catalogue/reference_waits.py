"""The entries of mutants of the reference engine, and of a hook of DDP, that each leave out one wait."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Grouping, Layout, Plan, Reshard

__all__ = ["MUTANTS"]

_UNITS = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
_SHARDED = Plan(layout=Layout.SHARD, units=_UNITS, grouping=Grouping.REQUIRED, reshard=Reshard.AFTER_FORWARD)
_HYBRID = replace(_SHARDED, layout=Layout.HYBRID)
_BY_HAND = frozenset({Capability.UNIT_STATE, Capability.ASYNC_GATHER})

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="ReadsGathersUnderWay",
        engine_spec="engine.mutants.reference_waits:ReadsGathersUnderWay",
        sin="the reference engine takes gathers as done without a wait for their work",
        thread="NVIDIA/Megatron-LM#663",
        kills_on=Condition(plan=_SHARDED),
        trace=Trace.RACES,
    ),
    Mutant(
        name="SendsPartsBeforeTheyAreCut",
        engine_spec="engine.mutants.reference_waits:SendsPartsBeforeTheyAreCut",
        sin="the reference engine gathers what it kept for pairs of ranks without a wait for its cut",
        thread="deepspeedai/DeepSpeed#8061",
        kills_on=Condition(
            world_size=4,
            plan=replace(_SHARDED, reshard=Reshard.TO_PAIRS),
            because="other policies keep no part",
        ),
        trace=Trace.RACES,
    ),
    Mutant(
        name="GathersByHandBeforeTheWrite",
        engine_spec="engine.mutants.reference_waits:GathersByHandBeforeTheWrite",
        sin="the reference engine gathers what the caller asks for without a wait for writes to shards",
        thread="NVIDIA/Megatron-LM#4609",
        kills_on=Condition(
            plan=replace(_SHARDED, demands=_BY_HAND), because="where nobody asks, an iteration's begin waits"
        ),
        trace=Trace.RACES,
    ),
    Mutant(
        name="TakesReductionsAsDone",
        engine_spec="engine.mutants.reference_waits:TakesReductionsAsDone",
        sin="the reference engine uses reduced gradients without a wait for the reduce-scatter",
        thread="flagos-ai/Torch-FL#62",
        kills_on=Condition(plan=_SHARDED),
        trace=Trace.RACES,
    ),
    Mutant(
        name="TakesTheSumOverReplicasAsDone",
        engine_spec="engine.mutants.reference_waits:TakesTheSumOverReplicasAsDone",
        sin="the reference engine uses gradients of replicas without a wait for the all-reduce",
        thread="NVIDIA/Megatron-LM#3670",
        kills_on=Condition(world_size=4, plan=_HYBRID, because="only a hybrid layout has replicas"),
        trace=Trace.RACES,
    ),
    Mutant(
        name="FreesReducedOutputs",
        engine_spec="engine.mutants.reference_waits:FreesReducedOutputs",
        sin="the reference engine lets go of what a reduction wrote while another stream may read it",
        thread="pytorch/pytorch#180665",
        kills_on=Condition(
            world_size=4,
            plan=replace(_HYBRID, reduce_dtype=torch.bfloat16),
            because="without a dtype of its own it is the gradient, which stays",
        ),
        trace=Trace.RACES,
    ),
    Mutant(
        name="DividesBeforeTheReduction",
        engine_spec="engine.mutants.hook_races:DividesBeforeTheReduction",
        sin="a communication hook of DDP divides what its reduction may still be writing",
        thread="flagos-ai/Torch-FL#62",
        kills_on=Condition(plan=Plan(layout=Layout.REPLICATE)),
        trace=Trace.RACES,
    ),
)
