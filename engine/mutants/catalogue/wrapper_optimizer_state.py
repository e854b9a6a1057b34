"""The entries of mutants of optimizer states of FullyShardedDataParallel."""

from __future__ import annotations

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Plan

__all__ = ["MUTANTS"]

_CALLED = Condition(
    plan=Plan(demands=frozenset({Capability.WRAPPER})), because="training alone saves nothing"
)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="NamesTheWrapperInOptimizerStates",
        engine_spec="engine.mutants.wrapper_optimizer_state:NamesTheWrapperInOptimizerStates",
        sin="names in the state of optimizers tell of the wrapper",
        thread="pytorch/pytorch#96252",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="LosesMomentumWhenItSaves",
        engine_spec="engine.mutants.wrapper_optimizer_state:LosesMomentumWhenItSaves",
        sin="in the state that is saved of an optimizer, moments are zero",
        thread="pytorch/pytorch#76671",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="LosesMomentum",
        engine_spec="engine.mutants.wrapper_optimizer_state:LosesMomentum",
        sin="what is loaded into an optimizer has moments of zero",
        thread="facebookresearch/fairscale#601",
        kills_on=_CALLED,
        trace=Trace.NUMBERS,
    ),
    Mutant(
        name="RestartsTheCountOfSteps",
        engine_spec="engine.mutants.wrapper_optimizer_state:RestartsTheCountOfSteps",
        sin="what is loaded into an optimizer counts its steps from zero",
        thread="huggingface/accelerate#3971",
        kills_on=_CALLED,
        trace=Trace.NUMBERS,
    ),
    Mutant(
        name="SavesTheLastMomentAsAll",
        engine_spec="engine.mutants.wrapper_optimizer_state:SavesTheLastMomentAsAll",
        sin="all moments in the state that is saved of an optimizer are the last one",
        thread="pytorch/pytorch#108298",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="SharesTheCountOfSteps",
        engine_spec="engine.mutants.wrapper_optimizer_state:SharesTheCountOfSteps",
        sin="the count of steps in the state that is saved of an optimizer is one tensor, which all parameters advance",
        thread="databricks/flashoptim#3",
        kills_on=_CALLED,
        trace=Trace.NUMBERS,
    ),
    Mutant(
        name="IgnoresTheStateGiven",
        engine_spec="engine.mutants.wrapper_optimizer_state:IgnoresTheStateGiven",
        sin="the state of the optimizer is saved although another was given",
        thread="pytorch/pytorch#99117",
        kills_on=_CALLED,
        trace=Trace.NUMBERS,
    ),
    Mutant(
        name="PermutesGroups",
        engine_spec="engine.mutants.wrapper_optimizer_state:PermutesGroups",
        sin="groups of parameters are saved with each other's members",
        thread="pytorch/pytorch#54736",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="RekeysToEachOther",
        engine_spec="engine.mutants.wrapper_optimizer_state:RekeysToEachOther",
        sin="rekeyed, a parameter's state is that of another",
        thread="pytorch/pytorch#54736",
        kills_on=_CALLED,
        trace=Trace.NUMBERS,
    ),
)
