"""The entries of mutants that hold back other reductions than they were told to, or lose or keep what they must not."""

from __future__ import annotations

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Grouping, Layout, Plan

__all__ = ["MUTANTS"]

_HELD = Plan(demands=frozenset({Capability.UNIT_SYNC}))
_SCATTERED = Plan(layout=Layout.HYBRID, demands=frozenset({Capability.REPLICA_SYNC}))
_ONE_MICROBATCH = "the only microbatch is the last, which nobody holds back"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="IgnoresSingleHolds",
        engine_spec="engine.mutants.holding_back:IgnoresSingleHolds",
        sin="a single unit that was told to hold its reduction back reduces",
        thread="Haian-Jin/LVSM#22",
        kills_on=Condition(steps=2, microbatches=2, plan=_HELD, because=_ONE_MICROBATCH),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="HoldsTheWholeTreeBack",
        engine_spec="engine.mutants.holding_back:HoldsTheWholeTreeBack",
        sin="where the root holds its reduction back, so do all units inside",
        thread="huggingface/accelerate#2790",
        kills_on=Condition(steps=2, microbatches=2, plan=_HELD, because=_ONE_MICROBATCH),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="LosesWhatItHeldBack",
        engine_spec="engine.mutants.holding_back:LosesWhatItHeldBack",
        sin="a unit that was held back drops the microbatches before the last",
        thread="NVIDIA/Megatron-LM#7186",
        kills_on=Condition(microbatches=2, plan=_HELD, because=_ONE_MICROBATCH),
    ),
    Mutant(
        name="ReducesReplicasAllTheSame",
        engine_spec="engine.mutants.holding_back:ReducesReplicasAllTheSame",
        sin="a unit that was told to reduce within its replica alone reduces across replicas",
        thread="NVIDIA/Megatron-LM#7186",
        kills_on=Condition(world_size=4, steps=2, microbatches=2, plan=_SCATTERED, because=_ONE_MICROBATCH),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="ForgetsTheSecondBackward",
        engine_spec="engine.mutants.holding_back:ForgetsTheSecondBackward",
        sin="the second of two backwards after two forwards finds parameters freed",
        thread="pytorch/pytorch#136861",
        kills_on=Condition(
            microbatches=2,
            plan=Plan(demands=frozenset({Capability.INTERLEAVE, Capability.UNIT_SYNC})),
            because="a backward right after its forward is the first",
        ),
        trace=Trace.CRASH,
    ),
    Mutant(
        name="ReducesWithoutBound",
        engine_spec="engine.mutants.holding_back:ReducesWithoutBound",
        sin="reductions are started without regard to how many may hold their input",
        thread="deepspeedai/DeepSpeed#7188",
        kills_on=Condition(
            steps=2, plan=Plan(max_reduce_buffers=1), because="with fewer units than the bound none is broken"
        ),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="AcceptsNoReduceBuffers",
        engine_spec="engine.mutants.holding_back:AcceptsNoReduceBuffers",
        sin="a bound of no reduction at all is accepted",
        thread="Tencent-Hunyuan/UniRL#410",
        kills_on=Condition(world_size=1, plan=Plan(max_reduce_buffers=0), because="other bounds can be kept"),
        trace=Trace.SILENCE,
    ),
    Mutant(
        name="SplitsJointUnits",
        engine_spec="engine.mutants.holding_back:SplitsJointUnits",
        sin="each module of a group of several is a group of its own",
        thread="Tencent-Hunyuan/UniRL#410",
        kills_on=Condition(
            steps=2,
            plan=Plan(units=("blocks.0,blocks.1",), grouping=Grouping.REQUIRED),
            because="counts hold from the second step on",
        ),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="TakesAllUnitsForOne",
        engine_spec="engine.mutants.holding_back:TakesAllUnitsForOne",
        sin="all parameters are one group whatever units were asked for",
        thread="facebookresearch/fairscale#791",
        kills_on=Condition(
            steps=2,
            plan=Plan(units=("blocks.0", "blocks.1"), grouping=Grouping.REQUIRED),
            because="counts hold from the second step on",
        ),
        trace=Trace.COMMUNICATION,
    ),
)
