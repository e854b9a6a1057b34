"""The entries of mutants that do not say what they cannot do."""

from __future__ import annotations

import torch

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Layout, Plan

__all__ = ["MUTANTS"]


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="ReplicatesInsteadOfSharding",
        engine_spec="engine.mutants.honesty:ReplicatesInsteadOfSharding",
        sin="parameters that were to be sharded are replicated",
        thread="Tencent-Hunyuan/UniRL#410",
        kills_on=Condition(plan=Plan(layout=Layout.SHARD), because="one rank's share is the whole"),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="CallsTheWholeItsChunks",
        engine_spec="engine.mutants.honesty:CallsTheWholeItsChunks",
        sin="every rank holds all of what was to be cut into uneven chunks",
        thread="Tencent-Hunyuan/UniRL#410",
        kills_on=Condition(plan=Plan(layout=Layout.SHARD), because="one rank's share is the whole"),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="ShowsSlicesOfWholes",
        engine_spec="engine.mutants.honesty:ShowsSlicesOfWholes",
        sin="every rank holds everything whole, and shows slices",
        thread="facebookresearch/fairscale#1050",
        kills_on=Condition(plan=Plan(layout=Layout.SHARD), because="one rank's share is the whole"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="AcceptsEveryPlan",
        engine_spec="engine.mutants.honesty:AcceptsEveryPlan",
        sin="plans beyond the declared capabilities are accepted without a word",
        thread="Tencent-Hunyuan/UniRL#410",
        kills_on=Condition(plan=Plan(layout=Layout.HYBRID), because="a declared plan is honoured"),
        trace=Trace.REFUSAL,
    ),
    Mutant(
        name="ReducesAsComputedUnasked",
        engine_spec="engine.mutants.honesty:ReducesAsComputedUnasked",
        sin="gradients are reduced in the compute dtype where they were to be reduced in the parameters' own",
        thread="pytorch/pytorch#194434",
        kills_on=Condition(
            world_size=2,
            plan=Plan(compute_dtype=torch.bfloat16, demands=frozenset({Capability.REDUCE_AS_STORED})),
            because="one rank sends nothing",
        ),
    ),
    Mutant(
        name="RefusesOnOneRank",
        engine_spec="engine.mutants.honesty:RefusesOnOneRank",
        sin="one rank refuses a model in forward, and the others go on",
        thread="huggingface/trl#6862",
        kills_on=Condition(because="nobody is left to wait for the rank that refuses"),
        trace=Trace.SILENCE,
    ),
)
