"""The entries of mutants that synchronise gradients never, not everywhere, or too often."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Accumulation, Plan

__all__ = ["MUTANTS"]

_LAST_MICROBATCH = Plan(accumulation=Accumulation.LAST_MICROBATCH)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="NeverSynchronises",
        engine_spec="engine.mutants.synchronisation:NeverSynchronises",
        sin="gradients stay on the rank that computed them",
        thread="pytorch/pytorch#109774",
        kills_on=Condition(because="one rank has nobody to synchronise with"),
    ),
    Mutant(
        name="SynchronisesEveryMicrobatch",
        engine_spec="engine.mutants.synchronisation:SynchronisesEveryMicrobatch",
        sin="gradients are reduced after each microbatch although accumulation was asked",
        thread="NVIDIA/cosmos-framework#161",
        kills_on=Condition(
            steps=2,
            microbatches=2,
            plan=_LAST_MICROBATCH,
            because="the only microbatch is also the last; counts hold from the second step on",
        ),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="DriftsByOneBit",
        engine_spec="engine.mutants.synchronisation:DriftsByOneBit",
        sin="one weight of one replica is off by a bit after each step",
        thread="deepspeedai/DeepSpeed#1801",
        kills_on=Condition(because="one rank has no replica to part from"),
    ),
)
