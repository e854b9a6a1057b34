"""The entries of mutants that are wrong about the graph of a forward, or about its order."""

from __future__ import annotations

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Plan

__all__ = ["MUTANTS"]


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="TakesTheFirstGraphForAll",
        engine_spec="engine.mutants.graph:TakesTheFirstGraphForAll",
        sin="what the first iteration used is waited for in all others",
        thread="pytorch/pytorch#79171",
        kills_on=Condition(
            world_size=1,
            steps=3,
            plan=Plan(demands=frozenset({Capability.UNUSED})),
            because="needs parameters that a later step does without",
        ),
        trace=Trace.CRASH,
    ),
    Mutant(
        name="SearchesTheGraph",
        engine_spec="engine.mutants.graph:SearchesTheGraph",
        sin="each forward's graph is searched for what it does not use",
        thread="pytorch/pytorch#24005",
        kills_on=Condition(world_size=1, because="needs a reentrant checkpoint"),
        trace=Trace.CRASH,
    ),
    Mutant(
        name="OrdersParametersByRank",
        engine_spec="engine.mutants.graph:OrdersParametersByRank",
        sin="the last rank packs the parameters of each layer in another order than the others",
        thread="pytorch/pytorch#64629",
        kills_on=Condition(because="a lone rank agrees with itself"),
    ),
)
