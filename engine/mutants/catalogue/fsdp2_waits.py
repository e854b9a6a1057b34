"""The entries of mutants of FSDP2 that each leave out one wait."""

from __future__ import annotations

from dataclasses import replace

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Grouping, Layout, Plan, Reshard

__all__ = ["MUTANTS"]

_UNITS = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
_SHARDED = Plan(layout=Layout.SHARD, units=_UNITS, grouping=Grouping.REQUIRED, reshard=Reshard.AFTER_FORWARD)
_BY_HAND = frozenset({Capability.UNIT_STATE, Capability.ASYNC_GATHER})

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="FreesTheGatherOutputInBackward",
        engine_spec="engine.mutants.fsdp2_waits:FreesTheGatherOutputInBackward",
        sin="in backward the output of a gather is let go while it may be copied from",
        thread="NVIDIA/Megatron-LM#5788",
        kills_on=Condition(plan=_SHARDED, because="what forward kept is not gathered in backward"),
        trace=Trace.RACES,
    ),
    Mutant(
        name="FreesTheLastGatherOutput",
        engine_spec="engine.mutants.fsdp2_waits:FreesTheLastGatherOutput",
        sin="at the end of forward the output of a gather is let go while it may be copied from",
        thread="NVIDIA/Megatron-LM#5788",
        kills_on=Condition(plan=_SHARDED, because="what forward kept is not gathered in backward"),
        trace=Trace.RACES,
    ),
    Mutant(
        name="GathersBeforeTheEventOfTheStep",
        engine_spec="engine.mutants.fsdp2_waits:GathersBeforeTheEventOfTheStep",
        sin="the first copy of an iteration does not wait for the event recorded after the optimizer",
        thread="NVIDIA/Megatron-LM#4609",
        kills_on=Condition(
            steps=2,
            plan=replace(_SHARDED, demands=frozenset({Capability.STEP_EVENT})),
            because="nothing is written before the first step, and others give no event",
        ),
        trace=Trace.RACES,
    ),
    Mutant(
        name="ReadsAnAsyncGatherUnderWay",
        engine_spec="engine.mutants.fsdp2_waits:ReadsAnAsyncGatherUnderWay",
        sin="a gather asked for ahead by the caller is copied out of without a wait for its work",
        thread="NVIDIA/Megatron-LM#663",
        kills_on=Condition(
            plan=replace(_SHARDED, demands=_BY_HAND), because="other gathers are ordered by their streams"
        ),
        trace=Trace.RACES,
    ),
    Mutant(
        name="RunsTheHookDuringTheReduction",
        engine_spec="engine.mutants.fsdp2_waits:RunsTheHookDuringTheReduction",
        sin="an all-reduce hook runs without a wait for the reduction whose output it is given",
        thread="NVIDIA/Megatron-LM#3670",
        kills_on=Condition(plan=_SHARDED),
        trace=Trace.RACES,
    ),
)
