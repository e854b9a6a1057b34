"""The entries of mutants whose ranks do not all begin with the model that they were given."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant
from engine.plan import Layout, Plan

__all__ = ["MUTANTS"]

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="ForgetsUnsavedBuffers",
        engine_spec="engine.mutants.initialisation:ForgetsUnsavedBuffers",
        sin="buffers that no state dict holds are empty on all ranks but the first",
        thread="EvolvingLMMs-Lab/lmms-engine#185",
        kills_on=Condition(because="the first rank is honest"),
    ),
    Mutant(
        name="StartsReplicasApart",
        engine_spec="engine.mutants.initialisation:StartsReplicasApart",
        sin="each replica draws initial weights of its own",
        thread="allenai/OLMo-core#319",
        kills_on=Condition(plan=Plan(layout=Layout.HYBRID), because="other layouts have no replicas"),
    ),
    Mutant(
        name="StartsOtherRanksAnew",
        engine_spec="engine.mutants.initialisation:StartsOtherRanksAnew",
        sin="all ranks but the first draw initial weights of their own",
        thread="pytorch/pytorch#105840",
        kills_on=Condition(because="the first rank is honest"),
    ),
)
