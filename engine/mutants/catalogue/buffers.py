"""The entries of mutants that lose buffers."""

from __future__ import annotations

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant
from engine.plan import Plan

__all__ = ["MUTANTS"]

_OWN = Plan(demands=frozenset({Capability.OWN_BUFFERS}))

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="GivesAllRanksTheBuffersOfOne",
        engine_spec="engine.mutants.buffers:GivesAllRanksTheBuffersOfOne",
        sin="all ranks are given the buffers of the first",
        thread="huggingface/pytorch-image-models#110",
        kills_on=Condition(
            steps=2, plan=_OWN, because="a lone rank has no others, and all begin with the same buffers"
        ),
    ),
    Mutant(
        name="KeepsReplacedBuffers",
        engine_spec="engine.mutants.buffers:KeepsReplacedBuffers",
        sin="buffers that forward replaced are put back",
        thread="pytorch/pytorch#63916",
        kills_on=Condition(world_size=1, steps=2, because="before the first forward nothing is replaced"),
    ),
)
