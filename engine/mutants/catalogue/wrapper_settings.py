"""The entries of mutants of state dict types of FullyShardedDataParallel."""

from __future__ import annotations

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Plan

__all__ = ["MUTANTS"]

_CALLED = Condition(plan=Plan(demands=frozenset({Capability.WRAPPER})), because="training alone sets no type")

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="ForgetsConfigs",
        engine_spec="engine.mutants.wrapper_settings:ForgetsConfigs",
        sin="state dicts are of the type that was set, and of its default configs",
        thread="pytorch/pytorch#109648",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="TellsTheNewTypeAsTheOld",
        engine_spec="engine.mutants.wrapper_settings:TellsTheNewTypeAsTheOld",
        sin="what was set before is told to be what is set now",
        thread="pytorch/pytorch#86243",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="SetsTheTypeOfTheFirstRootAlone",
        engine_spec="engine.mutants.wrapper_settings:SetsTheTypeOfTheFirstRootAlone",
        sin="of several wrapped models in a module, only the first is set to a type",
        thread="pytorch/pytorch#73716",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="ScopesNothing",
        engine_spec="engine.mutants.wrapper_settings:ScopesNothing",
        sin="the context state_dict_type changes nothing",
        thread="pytorch/pytorch#109648",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="LeavesFullStateDicts",
        engine_spec="engine.mutants.wrapper_settings:LeavesFullStateDicts",
        sin="at the end of a context the type is the default, not what it was before",
        thread="pytorch/torchtitan#3724",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="LeavesTheTypeAfterAnException",
        engine_spec="engine.mutants.wrapper_settings:LeavesTheTypeAfterAnException",
        sin="an exception inside a context leaves the type that the context had set",
        thread="pytorch/torchtitan#3724",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="TakesConfigsOfOtherTypes",
        engine_spec="engine.mutants.wrapper_settings:TakesConfigsOfOtherTypes",
        sin="a config that belongs to another type is ignored in silence",
        thread="pytorch/pytorch#109648",
        kills_on=_CALLED,
        trace=Trace.SILENCE,
    ),
    Mutant(
        name="TellsTheTypeOfSomeUnit",
        engine_spec="engine.mutants.wrapper_settings:TellsTheTypeOfSomeUnit",
        sin="where units are set to several types, that of one of them is told",
        thread="pytorch/pytorch#102658",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
)
