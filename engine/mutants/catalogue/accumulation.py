"""The entries of mutants that lose or inflate gradients from one microbatch to the next."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant

__all__ = ["MUTANTS"]


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
)
