"""The entries of mutants of hooks and clipping of FullyShardedDataParallel."""

from __future__ import annotations

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Plan

__all__ = ["MUTANTS"]

_CALLED = Condition(
    plan=Plan(demands=frozenset({Capability.WRAPPER})),
    because="training alone registers no hook and clips nothing",
)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="TakesAnyHook",
        engine_spec="engine.mutants.wrapper_clipping:TakesAnyHook",
        sin="a communication hook is registered whatever it is, whoever is asked, and however many there are",
        thread="pytorch/pytorch#79833",
        kills_on=_CALLED,
        trace=Trace.SILENCE,
    ),
    Mutant(
        name="CallsHooksOfReplicasAlone",
        engine_spec="engine.mutants.wrapper_clipping:CallsHooksOfReplicasAlone",
        sin="of shards a communication hook is never called",
        thread="pytorch/pytorch#83254",
        kills_on=_CALLED,
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="CallsHooksTwice",
        engine_spec="engine.mutants.wrapper_clipping:CallsHooksTwice",
        sin="a communication hook is called twice for each gradient",
        thread="mindspore-ai/hyper-parallel#694",
        kills_on=_CALLED,
        trace=Trace.NUMBERS,
    ),
    Mutant(
        name="GivesHooksCopies",
        engine_spec="engine.mutants.wrapper_clipping:GivesHooksCopies",
        sin="what a communication hook makes of a gradient reaches a copy of it",
        thread="pytorch/pytorch#43307",
        kills_on=_CALLED,
        trace=Trace.NUMBERS,
    ),
    Mutant(
        name="CompressesNothing",
        engine_spec="engine.mutants.wrapper_clipping:CompressesNothing",
        sin="the hooks that compress gradients communicate them as they are",
        thread="pytorch/pytorch#81711",
        kills_on=_CALLED,
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="ClipsShardsByTheirOwnNorm",
        engine_spec="engine.mutants.wrapper_clipping:ClipsShardsByTheirOwnNorm",
        sin="clip_grad_norm_ goes by the norm of what each rank has",
        thread="pytorch/pytorch#170862",
        kills_on=_CALLED,
        trace=Trace.NUMBERS,
    ),
    Mutant(
        name="ClipsAndTellsNothing",
        engine_spec="engine.mutants.wrapper_clipping:ClipsAndTellsNothing",
        sin="clip_grad_norm_ clips, and returns None",
        thread="pytorch/pytorch#87401",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="SumsTheLargest",
        engine_spec="engine.mutants.wrapper_clipping:SumsTheLargest",
        sin="clip_grad_norm_ adds up over ranks what is no sum: norms, and largest elements",
        thread="meta-pytorch/torchrec#3199",
        kills_on=_CALLED,
        trace=Trace.NUMBERS,
    ),
    Mutant(
        name="SumsNormsOfReplicas",
        engine_spec="engine.mutants.wrapper_clipping:SumsNormsOfReplicas",
        sin="clip_grad_norm_ counts what every rank has whole once for each rank",
        thread="pytorch/pytorch#88955",
        kills_on=_CALLED,
        trace=Trace.NUMBERS,
    ),
    Mutant(
        name="ScalesLittleUp",
        engine_spec="engine.mutants.wrapper_clipping:ScalesLittleUp",
        sin="clip_grad_norm_ scales gradients of a smaller norm up to the limit",
        thread="DingfanChen/GS-WGAN#5",
        kills_on=_CALLED,
        trace=Trace.NUMBERS,
    ),
    Mutant(
        name="TellsNormsInSinglePrecision",
        engine_spec="engine.mutants.wrapper_clipping:TellsNormsInSinglePrecision",
        sin="the norm that clip_grad_norm_ returns is of single precision, whatever gradients are",
        thread="pytorch/xla#7205",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="ClipsUnitsAlone",
        engine_spec="engine.mutants.wrapper_clipping:ClipsUnitsAlone",
        sin="a unit inside the root can be told to clip, and does so by its own norm",
        thread="pytorch/pytorch#170862",
        kills_on=_CALLED,
        trace=Trace.SILENCE,
    ),
)
