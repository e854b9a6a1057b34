"""The entries of mutants that do not know a recomputed forward for what it is."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Plan, Reshard

__all__ = ["MUTANTS"]


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="RecomputesBeforeTheGatherIsOver",
        engine_spec="engine.mutants.recompute:RecomputesBeforeTheGatherIsOver",
        sin="a recomputed forward takes the last rank's rows for zeros",
        thread="NVIDIA/Megatron-LM#6153",
        kills_on=Condition(
            because="one rank has all rows; units whose forward runs once meet whole parameters"
        ),
    ),
    Mutant(
        name="GathersAgainAfterARecompute",
        engine_spec="engine.mutants.recompute:GathersAgainAfterARecompute",
        sin="backward gathers a recomputed unit twice",
        thread="NVIDIA-NeMo/Automodel#3373",
        kills_on=Condition(
            steps=2,
            plan=Plan(reshard=Reshard.AFTER_FORWARD),
            because="one rank gathers nothing; counts hold from the second step on",
        ),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="GathersWhatBackwardDoesWithout",
        engine_spec="engine.mutants.recompute:GathersWhatBackwardDoesWithout",
        sin="units to be gathered for forward alone are gathered for backward too",
        thread="meta-pytorch/autoparallel#469",
        kills_on=Condition(
            steps=2,
            plan=Plan(gathered_once=("token,position",)),
            because="one rank gathers nothing; counts hold from the second step on",
        ),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="CountsRecomputedGradientsTwice",
        engine_spec="engine.mutants.recompute:CountsRecomputedGradientsTwice",
        sin="gradients by way of a recomputed forward are doubled",
        thread="facebookresearch/fairscale#777",
        kills_on=Condition(world_size=1, because="without checkpoints nothing is computed again"),
    ),
)
