"""The entries of mutants that sin in a world of one rank alone."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Layout, Plan

__all__ = ["MUTANTS"]


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="CommunicatesAlone",
        engine_spec="engine.mutants.solitude:CommunicatesAlone",
        sin="a rank that is alone makes collectives with itself",
        thread="NVIDIA/Megatron-LM#6660",
        kills_on=Condition(world_size=1, plan=Plan(layout=Layout.SHARD), because="several ranks must talk"),
        trace=Trace.COMMUNICATION,
    ),
)
