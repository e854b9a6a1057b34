"""The entries of mutants by whose hands wrapped parameters begin wrongly."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Layout, Plan
from engine.wrapper import Wrapper

__all__ = ["MUTANTS"]

_PLAN = Plan(layout=Layout.SHARD, wrapper=Wrapper())

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="IgnoresTheInitialiser",
        engine_spec="engine.mutants.wrapper_beginnings:IgnoresTheInitialiser",
        sin="param_init_fn is never called",
        thread="pytorch/pytorch#105840",
        kills_on=Condition(plan=_PLAN, because="models with memory need none"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="NeverResets",
        engine_spec="engine.mutants.wrapper_beginnings:NeverResets",
        sin="modules without memory are left at zeros",
        thread="EvolvingLMMs-Lab/lmms-engine#185",
        kills_on=Condition(plan=_PLAN, because="models with memory are left as they are"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="LeavesBuffersWithoutMemory",
        engine_spec="engine.mutants.wrapper_beginnings:LeavesBuffersWithoutMemory",
        sin="buffers without memory are left without",
        thread="verl-project/verl#7834",
        kills_on=Condition(plan=_PLAN, because="models with memory are left as they are"),
        trace=Trace.CRASH,
    ),
    Mutant(
        name="StartsEachRankOnItsOwn",
        engine_spec="engine.mutants.wrapper_beginnings:StartsEachRankOnItsOwn",
        sin="sync_module_states has no effect",
        thread="allenai/OLMo-core#319",
        kills_on=Condition(plan=_PLAN, because="ranks that start alike need no broadcast"),
        trace=Trace.STATE,
    ),
    Mutant(
        name="WrapsContainersSilently",
        engine_spec="engine.mutants.wrapper_beginnings:WrapsContainersSilently",
        sin="a list of modules is wrapped without a warning",
        thread="pytorch/pytorch#109385",
        kills_on=Condition(
            world_size=1, plan=_PLAN, because="other modules are wrapped silently, and rightly"
        ),
        trace=Trace.STATE,
    ),
)
