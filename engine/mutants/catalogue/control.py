"""The entries of mutants that do not do what the caller tells single units."""

from __future__ import annotations

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Accumulation, Grouping, Layout, Plan, Reshard, Roots

__all__ = ["MUTANTS"]

_CONTROLLED = Plan(
    layout=Layout.SHARD,
    grouping=Grouping.REQUIRED,
    reshard=Reshard.KEEP,
    demands=frozenset({Capability.UNIT_STATE}),
)
_SEVERAL_ROOTS = Plan(layout=Layout.SHARD, roots=Roots.EACH_UNIT, accumulation=Accumulation.LAST_MICROBATCH)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="ReshardsTheRootAlone",
        engine_spec="engine.mutants.control:ReshardsTheRootAlone",
        sin="a call to free a unit has no effect on units inside the root",
        thread="meta-pytorch/torchtune#2483",
        kills_on=Condition(plan=_CONTROLLED),
        trace=Trace.STATE,
    ),
    Mutant(
        name="IgnoresALaterPolicy",
        engine_spec="engine.mutants.control:IgnoresALaterPolicy",
        sin="a policy set once the model is wrapped has no effect",
        thread="pytorch/pytorch#149029",
        kills_on=Condition(plan=_CONTROLLED),
        trace=Trace.STATE,
    ),
    Mutant(
        name="TellsAllWhatOneWasTold",
        engine_spec="engine.mutants.control:TellsAllWhatOneWasTold",
        sin="a policy set on the root alone reaches the units inside it",
        thread="pytorch/pytorch#124318",
        kills_on=Condition(plan=_CONTROLLED, because="a root without units tells nobody else"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="GathersInForwardAlone",
        engine_spec="engine.mutants.control:GathersInForwardAlone",
        sin="a call to gather a unit does nothing",
        thread="deepspeedai/DeepSpeed#1069",
        kills_on=Condition(plan=_CONTROLLED),
        trace=Trace.STATE,
    ),
    Mutant(
        name="WaitsForNoGather",
        engine_spec="engine.mutants.control:WaitsForNoGather",
        sin="an asynchronous gather of a unit without parameters raises",
        thread="facebookresearch/fairscale#441",
        kills_on=Condition(world_size=1, plan=_CONTROLLED, because="a root that owns parameters is gathered"),
        trace=Trace.CRASH,
    ),
    Mutant(
        name="GathersWhenWaitedFor",
        engine_spec="engine.mutants.control:GathersWhenWaitedFor",
        sin="every other rank issues asynchronous gathers only when they are waited for",
        thread="meta-pytorch/torchrec#4149",
        kills_on=Condition(
            plan=_CONTROLLED, because="with nothing between a gather and its wait, all ranks have one order"
        ),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="LeavesOthersRowsStale",
        engine_spec="engine.mutants.control:LeavesOthersRowsStale",
        sin="an asynchronous gather leaves the rows of other ranks as they were before",
        thread="karpathy/nanochat#843",
        kills_on=Condition(steps=2, plan=_CONTROLLED, because="before the first gather there is none"),
        trace=Trace.NUMBERS,
    ),
    Mutant(
        name="HoldsBackTheFirstRootAlone",
        engine_spec="engine.mutants.control:HoldsBackTheFirstRootAlone",
        sin="of several roots all but the first reduce in every microbatch",
        thread="speechbrain/speechbrain#2010",
        kills_on=Condition(
            steps=2,
            microbatches=2,
            plan=_SEVERAL_ROOTS,
            because="the only microbatch is also the last; counts hold from the second step on",
        ),
        trace=Trace.COMMUNICATION,
    ),
)
