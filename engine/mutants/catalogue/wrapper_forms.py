"""The entries of mutants that misread the settings of state dicts."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Layout, Plan
from engine.wrapper import Wrapper

__all__ = ["MUTANTS"]

_PLAN = Plan(layout=Layout.SHARD, wrapper=Wrapper())

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="IgnoresStateConfigs",
        engine_spec="engine.mutants.wrapper_forms:IgnoresStateConfigs",
        sin="configs of state dicts have no effect",
        thread="Lightning-AI/lightning-thunder#908",
        kills_on=Condition(plan=_PLAN, because="their defaults are honoured"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="GivesShardsForWholes",
        engine_spec="engine.mutants.wrapper_forms:GivesShardsForWholes",
        sin="a full state dict is a sharded one",
        thread="facebookresearch/fairscale#601",
        kills_on=Condition(plan=_PLAN, because="other types are honoured"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="GivesWholesForShards",
        engine_spec="engine.mutants.wrapper_forms:GivesWholesForShards",
        sin="a sharded state dict is a full one",
        thread="pytorch/pytorch#136228",
        kills_on=Condition(plan=_PLAN, because="other types are honoured"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="NumbersStateByName",
        engine_spec="engine.mutants.wrapper_forms:NumbersStateByName",
        sin="ids of optimizer state follow the alphabet",
        thread="pytorch/pytorch#54736",
        kills_on=Condition(plan=_PLAN, because="names are right"),
        trace=Trace.STATE,
    ),
)
