"""The entries of mutants that take a wrapped step wrongly."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Layout, Plan
from engine.wrapper import Wrapper

__all__ = ["MUTANTS"]

_PLAN = Plan(layout=Layout.SHARD, wrapper=Wrapper())

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="ReadsOffloadedGradientsTooEarly",
        engine_spec="engine.mutants.wrapper_steps:ReadsOffloadedGradientsTooEarly",
        sin="offloaded gradients are read before they are there",
        thread="pytorch/pytorch#180665",
        kills_on=Condition(plan=_PLAN, because="nothing else is offloaded"),
    ),
    Mutant(
        name="SwapsBackwardPrefetch",
        engine_spec="engine.mutants.wrapper_steps:SwapsBackwardPrefetch",
        sin="each moment of backward prefetch is taken for another",
        thread="pytorch/pytorch#107058",
        kills_on=Condition(plan=_PLAN, because="only the order of calls shows it"),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="InvertsForwardPrefetch",
        engine_spec="engine.mutants.wrapper_steps:InvertsForwardPrefetch",
        sin="forward prefetches unless asked to",
        thread="pytorch/pytorch#106030",
        kills_on=Condition(plan=_PLAN, because="only the order of calls shows it"),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="GathersAllUnitsAtOnce",
        engine_spec="engine.mutants.wrapper_steps:GathersAllUnitsAtOnce",
        sin="every unit is being gathered before the first one runs",
        thread="pytorch/pytorch#107058",
        kills_on=Condition(plan=_PLAN, because="a lone rank gathers nothing"),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="KeepsOverflowLocal",
        engine_spec="engine.mutants.wrapper_steps:KeepsOverflowLocal",
        sin="a rank skips a step by itself when its gradients are infinite",
        thread="pytorch/pytorch#115710",
        kills_on=Condition(plan=_PLAN, because="finite gradients are nobody else's business"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="DividesWrappedGradientsTwice",
        engine_spec="engine.mutants.wrapper_steps:DividesWrappedGradientsTwice",
        sin="wrapped gradients are divided by the number of ranks twice",
        thread="NVIDIA/Megatron-LM#3023",
        kills_on=Condition(plan=_PLAN, because="a lone rank divides by one"),
    ),
    Mutant(
        name="ReducesDespiteNoSync",
        engine_spec="engine.mutants.wrapper_steps:ReducesDespiteNoSync",
        sin="wrapped microbatches are all reduced within no_sync",
        thread="Haian-Jin/LVSM#22",
        kills_on=Condition(plan=_PLAN, because="the last microbatch is reduced anyway"),
        trace=Trace.COMMUNICATION,
    ),
)
