"""The entries of mutants that do not wait for what is under way."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Grouping, Layout, Plan, Reshard

__all__ = ["MUTANTS"]

_UNITS = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
_SHARDED = Plan(layout=Layout.SHARD, units=_UNITS, grouping=Grouping.REQUIRED, reshard=Reshard.AFTER_FORWARD)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="ClearsTheReduceInput",
        engine_spec="engine.mutants.late:ClearsTheReduceInput",
        sin="the input of a reduction is cleared while the reduction is under way",
        thread="deepspeedai/DeepSpeed#7188",
        kills_on=Condition(plan=_SHARDED),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="FreesTheInputOfAReduction",
        engine_spec="engine.mutants.late:FreesTheInputOfAReduction",
        sin="the input of a reduction is freed while the reduction is under way",
        thread="NVIDIA/Megatron-LM#5788",
        kills_on=Condition(plan=_SHARDED),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="FillsTheGatherOutput",
        engine_spec="engine.mutants.late:FillsTheGatherOutput",
        sin="the output of a gather is written to while the gather is under way",
        thread="NVIDIA/Megatron-LM#4609",
        kills_on=Condition(plan=_SHARDED),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="ReadsBucketsTooEarly",
        engine_spec="engine.mutants.late:ReadsBucketsTooEarly",
        sin="a hook reads its bucket before the future of the reduction is done",
        thread="flagos-ai/Torch-FL#62",
    ),
    Mutant(
        name="ForgetsTheWorkOfANorm",
        engine_spec="engine.mutants.late:ForgetsTheWorkOfANorm",
        sin="a hook starts a collective that nobody ever waits for",
        thread="pytorch/pytorch#64629",
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="TrustsTheOrderOfArrival",
        engine_spec="engine.mutants.late:TrustsTheOrderOfArrival",
        sin="messages of several ranks are taken to come in the order of ranks",
        thread="pytorch/pytorch#64629",
        kills_on=Condition(world_size=3, because="from one rank there is one order"),
    ),
)
