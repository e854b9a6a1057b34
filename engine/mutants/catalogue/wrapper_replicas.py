"""The entries of mutants of our own wrapper that forget replicas."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Layout, Plan
from engine.wrapper import Wrapper

__all__ = ["MUTANTS"]

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="StartsEachReplicaOnItsOwn",
        engine_spec="engine.mutants.wrapper_replicas:StartsEachReplicaOnItsOwn",
        sin="sync_module_states does not reach other replicas",
        thread="pytorch/pytorch#154888",
        kills_on=Condition(
            plan=Plan(layout=Layout.SHARD, wrapper=Wrapper()),
            because="a replica alone starts with its own values",
        ),
        trace=Trace.STATE,
    ),
)
