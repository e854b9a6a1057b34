"""The entries of mutants that sin where parameters and gradients live on the host."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant
from engine.plan import Offload, Plan

__all__ = ["MUTANTS"]

_OFFLOAD = Plan(offload=Offload.CPU)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="OffloadsZeros",
        engine_spec="engine.mutants.offload:OffloadsZeros",
        sin="gradients on the host are zeros",
        thread="flagos-ai/Torch-FL#62",
        kills_on=Condition(world_size=1, plan=_OFFLOAD, because="without offload nothing is copied"),
    ),
    Mutant(
        name="OffloadsLastBackwardsGradients",
        engine_spec="engine.mutants.offload:OffloadsLastBackwardsGradients",
        sin="gradients on the host are those of the backward before",
        thread="pytorch/pytorch#180666",
        kills_on=Condition(
            world_size=1, steps=2, plan=_OFFLOAD, because="the first backward has none before"
        ),
    ),
    Mutant(
        name="OverwritesOffloadedGradients",
        engine_spec="engine.mutants.offload:OverwritesOffloadedGradients",
        sin="a gradient that arrives on the host replaces what was there",
        thread="hpcaitech/ColossalAI#2496",
        kills_on=Condition(
            world_size=1,
            microbatches=2,
            plan=_OFFLOAD,
            because="before the first microbatch nothing is there",
        ),
    ),
    Mutant(
        name="UpdatesACopy",
        engine_spec="engine.mutants.offload:UpdatesACopy",
        sin="with offload the optimizer updates a copy of the last parameter",
        thread="pytorch/pytorch#85048",
        kills_on=Condition(world_size=1, plan=_OFFLOAD, because="without offload there is no copy"),
    ),
)
