"""The entries of mutants that cut parameters along another dim, put them together wrongly, or show too much."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Layout, Placement, Plan

__all__ = ["MUTANTS"]

_LARGEST = Plan(layout=Layout.SHARD, placement=Placement.LARGEST)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="ShardsTheFirstDim",
        engine_spec="engine.mutants.placement:ShardsTheFirstDim",
        sin="the first dim is sharded whatever dim was asked for",
        thread="pytorch/torchtitan#1483",
        kills_on=Condition(plan=_LARGEST, because="one rank's shard is whole in all dims"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="DropsWhatTheLayoutExcludes",
        engine_spec="engine.mutants.placement:DropsWhatTheLayoutExcludes",
        sin="of two options that exclude each other one is dropped without a word",
        thread="Tencent-Hunyuan/UniRL#410",
        kills_on=Condition(
            world_size=1,
            plan=Plan(layout=Layout.REPLICATE, placement=Placement.LARGEST),
            because="options that fit each other are honoured but for placement and policy",
        ),
        trace=Trace.SILENCE,
    ),
    Mutant(
        name="ReassemblesAlongTheFirstDim",
        engine_spec="engine.mutants.placement:ReassemblesAlongTheFirstDim",
        sin="shards of the second dim are put together as if they were shards of the first",
        thread="pytorch/torchtitan#1483",
        kills_on=Condition(plan=_LARGEST, because="needs a parameter whose largest dim is the second"),
    ),
    Mutant(
        name="ShowsPaddingRows",
        engine_spec="engine.mutants.placement:ShowsPaddingRows",
        sin="forward sees the rows with which the last weight was padded",
        thread="Lightning-AI/lightning-thunder#908",
        kills_on=Condition(because="one rank divides all rows"),
        trace=Trace.CRASH,
    ),
    Mutant(
        name="InfersTheSizeFromItsShard",
        engine_spec="engine.mutants.placement:InfersTheSizeFromItsShard",
        sin="of rows that ranks do not divide, a wrong number is inferred from a rank's own",
        thread="pytorch/torchtitan#4593",
        kills_on=Condition(because="one rank's rows are all rows"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="KeepsWholeOptimizerState",
        engine_spec="engine.mutants.placement:KeepsWholeOptimizerState",
        sin="each rank keeps optimizer state of the shape of whole parameters",
        thread="huggingface/accelerate#3859",
        kills_on=Condition(plan=Plan(layout=Layout.SHARD), because="one rank's shard is the whole"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="ShowsStridedParameters",
        engine_spec="engine.mutants.placement:ShowsStridedParameters",
        sin="forward sees parameters whose memory is not in the order of their shape",
        thread="pytorch/torchtitan#1483",
        kills_on=Condition(world_size=1),
        trace=Trace.STATE,
    ),
    Mutant(
        name="HandsOutStridedGradients",
        engine_spec="engine.mutants.placement:HandsOutStridedGradients",
        sin="gradients are handed out with memory that is not in the order of their shape",
        thread="pytorch/torchtitan#4593",
        kills_on=Condition(world_size=1),
        trace=Trace.STATE,
    ),
)
