"""The entries of mutants that mistreat what a backward through one branch gathered for another."""

from __future__ import annotations

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Grouping, Layout, Plan

__all__ = ["MUTANTS"]

_BY_BRANCH = Plan(
    layout=Layout.SHARD,
    units=("trunk", "left", "right"),
    grouping=Grouping.REQUIRED,
    demands=frozenset({Capability.UNIT_SYNC}),
)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="GathersMistakenPrefetchesAgain",
        engine_spec="engine.mutants.branches:GathersMistakenPrefetchesAgain",
        sin="units that one backward gathered for the next are gathered again for it",
        thread="pytorch/pytorch#118118",
        kills_on=Condition(steps=2, plan=_BY_BRANCH, because="a single backward has no next one"),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="TakesUnusedPrefetchesAsCurrent",
        engine_spec="engine.mutants.branches:TakesUnusedPrefetchesAsCurrent",
        sin="units that the last backward gathered and did not use are stale in the next step",
        thread="pytorch/pytorch#137348",
        kills_on=Condition(steps=2, plan=_BY_BRANCH, because="the first step has no step before it"),
    ),
)
