"""The entries of mutants that communicate right, yet not while units compute, or not ahead as asked."""

from __future__ import annotations

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Grouping, Layout, Plan, Prefetch, Reshard

__all__ = ["MUTANTS"]

_UNITS = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
_FREED = Plan(
    layout=Layout.SHARD,
    units=_UNITS,
    grouping=Grouping.REQUIRED,
    reshard=Reshard.AFTER_FORWARD,
    demands=frozenset({Capability.PREFETCH}),
)
_AHEAD = Plan(
    layout=Layout.SHARD,
    units=_UNITS,
    grouping=Grouping.REQUIRED,
    reshard=Reshard.AFTER_FORWARD,
    prefetch=Prefetch.by_distance(_UNITS, forward=1, backward=1),
)
_STEADY = "order is told from the second step on"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="WaitsForEachGather",
        engine_spec="engine.mutants.overlap:WaitsForEachGather",
        sin="the stream of compute waits for a gather as soon as it is issued",
        thread="deepspeedai/DeepSpeed#7804",
        kills_on=Condition(steps=2, plan=_AHEAD, because=_STEADY),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="WaitsForEachReduction",
        engine_spec="engine.mutants.overlap:WaitsForEachReduction",
        sin="the stream of compute waits for a reduction as soon as it is issued",
        thread="deepspeedai/DeepSpeed#7804",
        kills_on=Condition(steps=2, plan=_FREED, because=_STEADY),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="WaitsWhereItGathers",
        engine_spec="engine.mutants.overlap:WaitsWhereItGathers",
        sin="a gather ahead of use is waited for in the call that issues it",
        thread="deepspeedai/DeepSpeed#1069",
        kills_on=Condition(steps=2, plan=_AHEAD, because=_STEADY),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="WaitsWhereItReduces",
        engine_spec="engine.mutants.overlap:WaitsWhereItReduces",
        sin="a reduction is waited for in the call that issues it",
        thread="deepspeedai/DeepSpeed#7804",
        kills_on=Condition(steps=2, plan=_FREED, because=_STEADY),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="PrefetchesAfterItsTurn",
        engine_spec="engine.mutants.overlap:PrefetchesAfterItsTurn",
        sin="backward gathers the next unit after the present one was computed, and not before",
        thread="pytorch/pytorch#106030",
        kills_on=Condition(steps=2, plan=_FREED, because=_STEADY),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="PrefetchesOneTooFew",
        engine_spec="engine.mutants.overlap:PrefetchesOneTooFew",
        sin="one unit less is prefetched than the list names",
        thread="deepspeedai/DeepSpeed#1069",
        kills_on=Condition(steps=2, plan=_AHEAD, because=_STEADY),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="PrefetchesTheUnitAfterNext",
        engine_spec="engine.mutants.overlap:PrefetchesTheUnitAfterNext",
        sin="the unit after the one that a list names is prefetched instead",
        thread="deepspeedai/DeepSpeed#1069",
        kills_on=Condition(steps=2, plan=_AHEAD, because=_STEADY),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="GathersEverythingFirst",
        engine_spec="engine.mutants.overlap:GathersEverythingFirst",
        sin="all units are gathered when forward begins",
        thread="NVIDIA/Megatron-LM#6153",
        kills_on=Condition(steps=2, plan=_AHEAD, because=_STEADY),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="FreesUnitsTogether",
        engine_spec="engine.mutants.overlap:FreesUnitsTogether",
        sin="all units are freed when forward is over, and not each after its own",
        thread="pytorch/pytorch#118118",
        kills_on=Condition(steps=2, plan=_FREED, because=_STEADY),
        trace=Trace.STATE,
    ),
)
