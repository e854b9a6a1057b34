"""The entries of mutants of methods of FullyShardedDataParallel."""

from __future__ import annotations

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Plan

__all__ = ["MUTANTS"]

_CALLED = Condition(
    plan=Plan(demands=frozenset({Capability.WRAPPER})), because="training alone calls no such method"
)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="WrapsItsModuleAgain",
        engine_spec="engine.mutants.wrapper_methods:WrapsItsModuleAgain",
        sin="what module gives is not what was wrapped, but a module around it",
        thread="pytorch/pytorch#87950",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="HidesAttributes",
        engine_spec="engine.mutants.wrapper_methods:HidesAttributes",
        sin="submodules and tensors are found through the wrapper, plain attributes and methods are not",
        thread="pytorch/pytorch#83351",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="CountsItemsFromOne",
        engine_spec="engine.mutants.wrapper_methods:CountsItemsFromOne",
        sin="an index is passed on to the wrapped list less by one",
        thread="pytorch/pytorch#83351",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="KnowsNoRootBeforeForward",
        engine_spec="engine.mutants.wrapper_methods:KnowsNoRootBeforeForward",
        sin="nobody is told to be the root who asks for the first time",
        thread="facebookresearch/fairscale#490",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="TakesUnitsForRoots",
        engine_spec="engine.mutants.wrapper_methods:TakesUnitsForRoots",
        sin="asked for roots alone, all units are listed",
        thread="facebookresearch/fairscale#490",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="AppliesToShards",
        engine_spec="engine.mutants.wrapper_methods:AppliesToShards",
        sin="apply gathers nothing: functions see what each rank has",
        thread="facebookresearch/fairscale#543",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="ForgetsWhatWasApplied",
        engine_spec="engine.mutants.wrapper_methods:ForgetsWhatWasApplied",
        sin="what functions do to whole parameters in apply is not written back",
        thread="pytorch/pytorch#107081",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="AppliesInSilence",
        engine_spec="engine.mutants.wrapper_methods:AppliesInSilence",
        sin="where apply is refused, it does nothing and says nothing",
        thread="Lightning-AI/pytorch-lightning#19755",
        kills_on=_CALLED,
        trace=Trace.SILENCE,
    ),
    Mutant(
        name="DropsKeywords",
        engine_spec="engine.mutants.wrapper_methods:DropsKeywords",
        sin="of the keywords of forward, plain numbers are dropped",
        thread="pytorch/pytorch#147531",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="KeepsItsPrefixInside",
        engine_spec="engine.mutants.wrapper_methods:KeepsItsPrefixInside",
        sin="names of parameters tell of the wrapper wherever one asks",
        thread="pytorch/pytorch#83351",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="StripsItsPrefixAlways",
        engine_spec="engine.mutants.wrapper_methods:StripsItsPrefixAlways",
        sin="names of parameters hide the wrapper even where what they name is a shard",
        thread="pytorch/pytorch#83351",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="KeepsItsPrefixOfBuffersInside",
        engine_spec="engine.mutants.wrapper_methods:KeepsItsPrefixOfBuffersInside",
        sin="names of buffers tell of the wrapper wherever one asks",
        thread="pytorch/pytorch#83351",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="CastsInputsInsteadOfItself",
        engine_spec="engine.mutants.wrapper_methods:CastsInputsInsteadOfItself",
        sin="a conversion once wrapped changes nothing; inputs are cast to what the model was made in",
        thread="pytorch/pytorch#90838",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
)
