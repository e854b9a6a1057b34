"""The entries of mutants of FSDP1 that each leave out one wait."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Grouping, Layout, Plan, Reshard

__all__ = ["MUTANTS"]

_UNITS = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
_SHARDED = Plan(layout=Layout.SHARD, units=_UNITS, grouping=Grouping.REQUIRED, reshard=Reshard.AFTER_FORWARD)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="ComputesForwardDuringTheGather",
        engine_spec="engine.mutants.fsdp1_waits:ComputesForwardDuringTheGather",
        sin="FSDP1 computes a forward without a wait for the gather of its parameters",
        thread="NVIDIA/Megatron-LM#663",
        kills_on=Condition(plan=_SHARDED),
        trace=Trace.RACES,
    ),
    Mutant(
        name="ComputesBackwardDuringTheGather",
        engine_spec="engine.mutants.fsdp1_waits:ComputesBackwardDuringTheGather",
        sin="FSDP1 computes a backward without a wait for the gather of its parameters",
        thread="NVIDIA/Megatron-LM#663",
        kills_on=Condition(plan=_SHARDED, because="what forward kept is not gathered in backward"),
        trace=Trace.RACES,
    ),
    Mutant(
        name="GathersFlatParametersDuringTheStep",
        engine_spec="engine.mutants.fsdp1_waits:GathersFlatParametersDuringTheStep",
        sin="FSDP1 begins an iteration without a wait for the optimizer",
        thread="NVIDIA/Megatron-LM#4609",
        kills_on=Condition(steps=2, plan=_SHARDED, because="nothing is written before the first step"),
        trace=Trace.RACES,
    ),
    Mutant(
        name="ReducesFlatGradientsInTheMaking",
        engine_spec="engine.mutants.fsdp1_waits:ReducesFlatGradientsInTheMaking",
        sin="FSDP1 reduces gradients without a wait for the stream of backward",
        thread="deepspeedai/DeepSpeed#7898",
        kills_on=Condition(plan=_SHARDED),
        trace=Trace.RACES,
    ),
    Mutant(
        name="StepsOnFlatGradientsInTheMaking",
        engine_spec="engine.mutants.fsdp1_waits:StepsOnFlatGradientsInTheMaking",
        sin="FSDP1 ends backward without a wait for its reductions",
        thread="flagos-ai/Torch-FL#62",
        kills_on=Condition(plan=_SHARDED),
        trace=Trace.RACES,
    ),
)
