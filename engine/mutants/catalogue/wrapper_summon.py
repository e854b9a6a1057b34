"""The entries of mutants of summon_full_params of FullyShardedDataParallel."""

from __future__ import annotations

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Plan

__all__ = ["MUTANTS"]

_CALLED = Condition(
    plan=Plan(demands=frozenset({Capability.WRAPPER})), because="training alone summons nothing"
)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="NeverWritesBack",
        engine_spec="engine.mutants.wrapper_summon:NeverWritesBack",
        sin="what is changed inside summon_full_params is lost",
        thread="pytorch/pytorch#107081",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="AlwaysWritesBack",
        engine_spec="engine.mutants.wrapper_summon:AlwaysWritesBack",
        sin="what is changed inside summon_full_params stays although it was not to be written back",
        thread="pytorch/pytorch#73903",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="WritesBackFromRank0",
        engine_spec="engine.mutants.wrapper_summon:WritesBackFromRank0",
        sin="what rank 0 wrote is written back to the shares of all ranks",
        thread="pytorch/pytorch#93938",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="AlwaysSummonsAll",
        engine_spec="engine.mutants.wrapper_summon:AlwaysSummonsAll",
        sin="units inside are summoned too although the root's own parameters were asked for",
        thread="pytorch/pytorch#92235",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="SummonsOnAllRanks",
        engine_spec="engine.mutants.wrapper_summon:SummonsOnAllRanks",
        sin="every rank is shown whole parameters although rank 0 alone was to be",
        thread="pytorch/pytorch#73903",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="SummonsNoGradients",
        engine_spec="engine.mutants.wrapper_summon:SummonsNoGradients",
        sin="gradients are not summoned although they were asked for",
        thread="pytorch/pytorch#98817",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="TakesEveryCombination",
        engine_spec="engine.mutants.wrapper_summon:TakesEveryCombination",
        sin="of options that exclude each other some are ignored, in silence",
        thread="pytorch/pytorch#93938",
        kills_on=_CALLED,
        trace=Trace.SILENCE,
    ),
    Mutant(
        name="SummonsAnywhere",
        engine_spec="engine.mutants.wrapper_summon:SummonsAnywhere",
        sin="where parameters cannot be summoned nothing happens and nothing is said",
        thread="pytorch/pytorch#104504",
        kills_on=_CALLED,
        trace=Trace.SILENCE,
    ),
    Mutant(
        name="SpoilsWhatGoesToTheHost",
        engine_spec="engine.mutants.wrapper_summon:SpoilsWhatGoesToTheHost",
        sin="what is summoned or saved to the host arrives with other values",
        thread="pytorch/pytorch#188989",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="MisalignsWhatItSummons",
        engine_spec="engine.mutants.wrapper_summon:MisalignsWhatItSummons",
        sin="every parameter is shown one element off",
        thread="pytorch/pytorch#97667",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
)
