"""The entries of mutants that misread mixed_precision of FullyShardedDataParallel."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Layout, Plan
from engine.wrapper import Wrapper

__all__ = ["MUTANTS"]

_PLAN = Plan(layout=Layout.SHARD, wrapper=Wrapper())

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="IgnoresMixedPrecision",
        engine_spec="engine.mutants.wrapper_precision:IgnoresMixedPrecision",
        sin="everything is computed and reduced in full precision",
        thread="verl-project/verl#6150",
        kills_on=Condition(plan=_PLAN, because="only low precision shows it"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="ComputesInBfloat16Unasked",
        engine_spec="engine.mutants.wrapper_precision:ComputesInBfloat16Unasked",
        sin="a precision that names no dtype computes in bfloat16",
        thread="pytorch/pytorch#143277",
        kills_on=Condition(plan=_PLAN, because="a dtype that is named is honoured"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="ComputesInTheReduceDtype",
        engine_spec="engine.mutants.wrapper_precision:ComputesInTheReduceDtype",
        sin="forward computes in the dtype to reduce in",
        thread="pytorch/pytorch#153077",
        kills_on=Condition(plan=_PLAN, because="without one it is honest"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="ReducesInTheComputeDtype",
        engine_spec="engine.mutants.wrapper_precision:ReducesInTheComputeDtype",
        sin="the dtype to reduce in has no effect",
        thread="pytorch/pytorch#190626",
        kills_on=Condition(plan=_PLAN, because="it may be that of computation anyway"),
    ),
    Mutant(
        name="IgnoresCastFlags",
        engine_spec="engine.mutants.wrapper_precision:IgnoresCastFlags",
        sin="the flags that say which inputs are cast have no effect",
        thread="pytorch/pytorch#160279",
        kills_on=Condition(plan=_PLAN, because="their defaults are honoured"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="KeepsLowGradients",
        engine_spec="engine.mutants.wrapper_precision:KeepsLowGradients",
        sin="gradients stay in low precision unasked",
        thread="huggingface/transformers#34645",
        kills_on=Condition(plan=_PLAN, because="only low precision shows it"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="CastsBatchNorm",
        engine_spec="engine.mutants.wrapper_precision:CastsBatchNorm",
        sin="BatchNorm computes in low precision",
        thread="pytorch/pytorch#196996",
        kills_on=Condition(plan=_PLAN, because="only low precision shows it"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="RoundsTheShards",
        engine_spec="engine.mutants.wrapper_precision:RoundsTheShards",
        sin="shards are kept in low precision",
        thread="pytorch/torchtitan#724",
        kills_on=Condition(plan=_PLAN, because="only low precision shows it"),
        trace=Trace.STATE,
    ),
)
