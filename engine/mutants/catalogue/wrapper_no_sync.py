"""The entries of mutants of no_sync of FullyShardedDataParallel."""

from __future__ import annotations

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Plan

__all__ = ["MUTANTS"]

_CALLED = Condition(
    plan=Plan(demands=frozenset({Capability.WRAPPER})), because="training alone accumulates nothing"
)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="ReplacesGradients",
        engine_spec="engine.mutants.wrapper_no_sync:ReplacesGradients",
        sin="each step of an accumulation discards the gradients of those before it",
        thread="NVIDIA/Megatron-LM#7186",
        kills_on=_CALLED,
        trace=Trace.NUMBERS,
    ),
    Mutant(
        name="LosesSharesInNoSync",
        engine_spec="engine.mutants.wrapper_no_sync:LosesSharesInNoSync",
        sin="entering no_sync discards the reduced gradients that a rank has",
        thread="pytorch/pytorch#90546",
        kills_on=_CALLED,
        trace=Trace.NUMBERS,
    ),
    Mutant(
        name="SynchronisesInNoSync",
        engine_spec="engine.mutants.wrapper_no_sync:SynchronisesInNoSync",
        sin="no_sync of the wrapper does nothing; sums are right",
        thread="huggingface/transformers#34645",
        kills_on=_CALLED,
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="KeepsTheRootInNoSync",
        engine_spec="engine.mutants.wrapper_no_sync:KeepsTheRootInNoSync",
        sin="inside no_sync the root keeps what it gathered, so that the next step gathers less",
        thread="pytorch/pytorch#75892",
        kills_on=_CALLED,
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="FreesInNoSync",
        engine_spec="engine.mutants.wrapper_no_sync:FreesInNoSync",
        sin="parameters that were to be kept from step to step inside no_sync are freed, and gathered again",
        thread="NVIDIA/cosmos-framework#161",
        kills_on=_CALLED,
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="EndsAllNoSyncsAtOnce",
        engine_spec="engine.mutants.wrapper_no_sync:EndsAllNoSyncsAtOnce",
        sin="the end of a no_sync inside another ends both",
        thread="speechbrain/speechbrain#2010",
        kills_on=_CALLED,
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="StaysSilentAfterAnException",
        engine_spec="engine.mutants.wrapper_no_sync:StaysSilentAfterAnException",
        sin="an exception inside no_sync leaves gradients unsynchronised for good",
        thread="pytorch/torchtitan#3724",
        kills_on=_CALLED,
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="SilencesUnitsAlone",
        engine_spec="engine.mutants.wrapper_no_sync:SilencesUnitsAlone",
        sin="a unit inside the root can be told not to synchronise, and the rest goes on",
        thread="speechbrain/speechbrain#2010",
        kills_on=_CALLED,
        trace=Trace.SILENCE,
    ),
)
