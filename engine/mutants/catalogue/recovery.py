"""The entries of mutants that go on where they were interrupted."""

from __future__ import annotations

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Accumulation, Grouping, Plan

__all__ = ["MUTANTS"]

_RECOVER = frozenset({Capability.RECOVER})

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="ComputesWithWhatAnEvaluationSaw",
        engine_spec="engine.mutants.recovery:ComputesWithWhatAnEvaluationSaw",
        sin="the step after an evaluation computes with the parameters that the evaluation saw",
        thread="pytorch/pytorch#137348",
        kills_on=Condition(world_size=1, steps=2, because="without an update since they are those of now"),
    ),
    Mutant(
        name="KeepsAnInferenceTensor",
        engine_spec="engine.mutants.recovery:KeepsAnInferenceTensor",
        sin="state made in inference mode is used for training",
        thread="pytorch/pytorch#113203",
        kills_on=Condition(world_size=1, because="state made by a training forward may be trained with"),
        trace=Trace.CRASH,
    ),
    Mutant(
        name="LeaksTheFailedIteration",
        engine_spec="engine.mutants.recovery:LeaksTheFailedIteration",
        sin="gradients of an iteration that failed are added to those of the next",
        thread="espnet/espnet#3283",
        kills_on=Condition(
            world_size=1,
            microbatches=2,
            plan=Plan(accumulation=Accumulation.LAST_MICROBATCH, demands=_RECOVER),
            because="a forward that fails in the first microbatch leaves no gradients",
        ),
    ),
    Mutant(
        name="NeverRecovers",
        engine_spec="engine.mutants.recovery:NeverRecovers",
        sin="what a failed forward left behind is not cleared away",
        thread="mosaicml/composer#3866",
        kills_on=Condition(
            plan=Plan(grouping=Grouping.REQUIRED, units=("first,second",), demands=_RECOVER),
            because="without an exception there is nothing to recover from",
        ),
    ),
)
