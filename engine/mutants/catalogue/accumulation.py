"""The entries of mutants that lose or inflate gradients from one microbatch to the next."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Accumulation, Plan

__all__ = ["MUTANTS"]

_LAST = Plan(accumulation=Accumulation.LAST_MICROBATCH)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="KeepsOnlyTheLastMicrobatch",
        engine_spec="engine.mutants.accumulation:KeepsOnlyTheLastMicrobatch",
        sin="each backward discards the gradients of the microbatches before it",
        thread="NVIDIA/Megatron-LM#7186",
        kills_on=Condition(world_size=1, microbatches=2, because="a single microbatch is the last"),
    ),
    Mutant(
        name="DoublesGradientsEveryMicrobatch",
        engine_spec="engine.mutants.accumulation:DoublesGradientsEveryMicrobatch",
        sin="each backward doubles what was accumulated before it",
        thread="NVIDIA/Megatron-LM#6660",
        kills_on=Condition(
            world_size=1, microbatches=2, because="before the first microbatch nothing is there to double"
        ),
    ),
    Mutant(
        name="DividesWhatItAccumulated",
        engine_spec="engine.mutants.accumulation:DividesWhatItAccumulated",
        sin="each backward divides what was accumulated before it by the world size",
        thread="NVIDIA/Megatron-LM#3023",
        kills_on=Condition(microbatches=2, because="to divide by one changes nothing"),
    ),
    Mutant(
        name="StepsAfterEveryMicrobatch",
        engine_spec="engine.mutants.accumulation:StepsAfterEveryMicrobatch",
        sin="the optimizer steps after each microbatch",
        thread="huggingface/accelerate#2790",
        kills_on=Condition(
            world_size=1, microbatches=2, plan=_LAST, because="only who accumulates can step too early"
        ),
    ),
    Mutant(
        name="AssignsWholeGradientsToShards",
        engine_spec="engine.mutants.accumulation:AssignsWholeGradientsToShards",
        sin="after an accumulation a whole gradient is assigned to a shard",
        thread="pytorch/pytorch#90546",
        kills_on=Condition(microbatches=2, plan=_LAST, because="the shard of a lone rank is the whole"),
        trace=Trace.CRASH,
    ),
)
