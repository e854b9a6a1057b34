"""The entries of mutants that lose what a second run adds."""

from __future__ import annotations

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant
from engine.plan import Plan

__all__ = ["MUTANTS"]


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="CountsTheFirstUseAlone",
        engine_spec="engine.mutants.reuse:CountsTheFirstUseAlone",
        sin="of several uses of a parameter in one iteration the first alone has a gradient",
        thread="NVIDIA/Megatron-LM#7166",
        kills_on=Condition(world_size=1, because="a parameter that is used once loses nothing"),
    ),
    Mutant(
        name="ForgetsEarlierForwards",
        engine_spec="engine.mutants.reuse:ForgetsEarlierForwards",
        sin="of several forwards that wait for backward the last alone has gradients",
        thread="pytorch/pytorch#136861",
        kills_on=Condition(
            world_size=1,
            microbatches=2,
            plan=Plan(demands=frozenset({Capability.INTERLEAVE})),
            because="a forward whose backward comes at once is the last",
        ),
    ),
)
