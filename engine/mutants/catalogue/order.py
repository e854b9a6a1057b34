"""The entries of mutants that gather and reduce in another order than they should, or ahead of use."""

from __future__ import annotations

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Accumulation, Grouping, Layout, Plan, Prefetch

__all__ = ["MUTANTS"]

_UNITS = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
_GROUPED = Plan(layout=Layout.SHARD, units=_UNITS, grouping=Grouping.REQUIRED)
_AHEAD = Plan(
    layout=Layout.SHARD,
    units=_UNITS,
    grouping=Grouping.REQUIRED,
    prefetch=Prefetch.by_distance(_UNITS, forward=2, backward=2),
)
_STEADY = "order is told from the second step on"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="NeverPrefetches",
        engine_spec="engine.mutants.order:NeverPrefetches",
        sin="each unit is gathered when it is needed, although a prefetch list asked for it earlier",
        thread="pytorch/pytorch#106030",
        kills_on=Condition(steps=2, plan=_AHEAD, because=_STEADY),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="PrefetchesOneTooFar",
        engine_spec="engine.mutants.order:PrefetchesOneTooFar",
        sin="one unit more is prefetched than the list names",
        thread="deepspeedai/DeepSpeed#1069",
        kills_on=Condition(steps=2, plan=_AHEAD, because=_STEADY),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="SwapsPrefetchesOnTheLastRank",
        engine_spec="engine.mutants.order:SwapsPrefetchesOnTheLastRank",
        sin="the last rank gathers prefetched units in another order than the others",
        thread="pytorch/pytorch#64629",
        kills_on=Condition(plan=_AHEAD, because="lists of one unit have one order"),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="GathersTheLastUnitFirst",
        engine_spec="engine.mutants.order:GathersTheLastUnitFirst",
        sin="the unit that forward needs last is gathered first",
        thread="pytorch/pytorch#76553",
        kills_on=Condition(steps=2, plan=_GROUPED, because=_STEADY),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="ReducesInTheOrderOfForward",
        engine_spec="engine.mutants.order:ReducesInTheOrderOfForward",
        sin="all reductions wait for the end of backward, and then come in the order of forward",
        thread="deepspeedai/DeepSpeed#7804",
        kills_on=Condition(steps=2, plan=_GROUPED, because=_STEADY),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="PrefetchesAgainInRecomputation",
        engine_spec="engine.mutants.order:PrefetchesAgainInRecomputation",
        sin="a recomputed forward gathers units whose backward is over",
        thread="NVIDIA-NeMo/Automodel#3373",
        kills_on=Condition(
            steps=2, plan=_AHEAD, because="only a checkpointed model runs a forward in backward"
        ),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="KeepsMistakenPrefetches",
        engine_spec="engine.mutants.order:KeepsMistakenPrefetches",
        sin="units that backward prefetched stay gathered, and are stale in the next step",
        thread="pytorch/pytorch#118118",
        kills_on=Condition(steps=2, plan=_AHEAD, because="the first step has no step before it"),
    ),
    Mutant(
        name="KeepsTheRootWhileAccumulating",
        engine_spec="engine.mutants.order:KeepsTheRootWhileAccumulating",
        sin="after a microbatch that accumulated, the root is not gathered again",
        thread="pytorch/pytorch#75892",
        kills_on=Condition(
            steps=2,
            microbatches=2,
            plan=Plan(accumulation=Accumulation.LAST_MICROBATCH),
            because="the only microbatch accumulates nothing",
        ),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="ReadsTheGatherTooEarly",
        engine_spec="engine.mutants.order:ReadsTheGatherTooEarly",
        sin="the output of a gather is read before it has arrived",
        thread="NVIDIA/Megatron-LM#663",
        kills_on=Condition(
            plan=_GROUPED,
            because="one rank gathers nothing; only a world that is late on purpose always tells",
        ),
    ),
    Mutant(
        name="GathersSynchronously",
        engine_spec="engine.mutants.order:GathersSynchronously",
        sin="gathers block although they were to be asynchronous",
        thread="deepspeedai/DeepSpeed#7804",
        kills_on=Condition(
            steps=2,
            plan=Plan(demands=frozenset({Capability.ASYNC_GATHER})),
            because="who is not asked may block",
        ),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="IgnoresTheStepEvent",
        engine_spec="engine.mutants.order:IgnoresTheStepEvent",
        sin="where an event tells of the optimizer step, forward uses the parameters from before it",
        thread="NVIDIA/Megatron-LM#663",
        kills_on=Condition(
            world_size=1,
            steps=2,
            plan=Plan(demands=frozenset({Capability.STEP_EVENT})),
            because="the first step has no step before it",
        ),
    ),
    Mutant(
        name="PrefetchesStaleParameters",
        engine_spec="engine.mutants.order:PrefetchesStaleParameters",
        sin="with prefetch lists, forward uses the parameters of the step before",
        thread="NVIDIA/Megatron-LM#4609",
        kills_on=Condition(
            world_size=1, steps=2, plan=_AHEAD, because="the first step has no step before it"
        ),
    ),
)
