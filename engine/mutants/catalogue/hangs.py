"""The entries of mutants that never come to an end."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant, Trace

__all__ = ["MUTANTS"]

_SECOND = Condition(steps=2, because="the first step is honest")

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="SkipsACountOnTheLastRank",
        engine_spec="engine.mutants.hangs:SkipsACountOnTheLastRank",
        sin="the last rank leaves a reduction out that the others make",
        thread="verl-project/verl#5591",
        kills_on=_SECOND,
        trace=Trace.HANG,
    ),
    Mutant(
        name="TakesTwoGroupsInTurn",
        engine_spec="engine.mutants.hangs:TakesTwoGroupsInTurn",
        sin="the last rank takes the collectives of two groups in another order",
        thread="meta-pytorch/torchrec#4149",
        trace=Trace.HANG,
    ),
    Mutant(
        name="ReducesInTheWrongGroup",
        engine_spec="engine.mutants.hangs:ReducesInTheWrongGroup",
        sin="the last rank waits in another group of the same ranks",
        thread="RLinf/RLinf#1540",
        trace=Trace.HANG,
    ),
    Mutant(
        name="NeverComesToAnEnd",
        engine_spec="engine.mutants.hangs:NeverComesToAnEnd",
        sin="the last rank computes for ever",
        thread="vllm-project/vllm#8410",
        kills_on=_SECOND,
        trace=Trace.HANG,
    ),
    Mutant(
        name="LocksItselfOut",
        engine_spec="engine.mutants.hangs:LocksItselfOut",
        sin="two threads of the last rank wait for each other",
        thread="horovod/horovod#3352",
        kills_on=_SECOND,
        trace=Trace.HANG,
    ),
    Mutant(
        name="SendsToNobody",
        engine_spec="engine.mutants.hangs:SendsToNobody",
        sin="rank 0 sends what nobody receives",
        thread="pytorch/pytorch#108378",
        kills_on=_SECOND,
        trace=Trace.HANG,
    ),
    Mutant(
        name="CountsFewerParametersOnTheLastRank",
        engine_spec="engine.mutants.hangs:CountsFewerParametersOnTheLastRank",
        sin="in prepare the last rank makes a collective less than the others",
        thread="pytorch/pytorch#68803",
        trace=Trace.HANG,
    ),
    Mutant(
        name="SkipsABackwardOnTheLastRank",
        engine_spec="engine.mutants.hangs:SkipsABackwardOnTheLastRank",
        sin="in one step the last rank's backward reduces nothing",
        thread="NVIDIA-NeMo/Automodel#2468",
        kills_on=_SECOND,
        trace=Trace.HANG,
    ),
)
