"""The entries of mutants of state dicts of FullyShardedDataParallel."""

from __future__ import annotations

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Plan

__all__ = ["MUTANTS"]

_CALLED = Condition(
    plan=Plan(demands=frozenset({Capability.WRAPPER})), because="training alone saves nothing"
)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="NamesTheWrapperInStates",
        engine_spec="engine.mutants.wrapper_state:NamesTheWrapperInStates",
        sin="names in state dicts tell of the wrapper",
        thread="pytorch/pytorch#74810",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="MixesUpBuffers",
        engine_spec="engine.mutants.wrapper_state:MixesUpBuffers",
        sin="in state dicts all buffers are the last one",
        thread="pytorch/pytorch#93391",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="ReusesWhatItSaved",
        engine_spec="engine.mutants.wrapper_state:ReusesWhatItSaved",
        sin="the memory of a state dict is written over by the next forward",
        thread="facebookresearch/fairscale#440",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="SavesOnEveryRank",
        engine_spec="engine.mutants.wrapper_state:SavesOnEveryRank",
        sin="every rank is given full state dicts although rank 0 alone was to be",
        thread="facebookresearch/fairscale#844",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="SavesWholesAsShards",
        engine_spec="engine.mutants.wrapper_state:SavesWholesAsShards",
        sin="a sharded state dict has every tensor whole, on every rank",
        thread="intelligent-machine-learning/dlrover#840",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="LoadsParametersAlone",
        engine_spec="engine.mutants.wrapper_state:LoadsParametersAlone",
        sin="loading a state dict leaves buffers as they were",
        thread="sgl-project/sglang#19688",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="IgnoresShardedStates",
        engine_spec="engine.mutants.wrapper_state:IgnoresShardedStates",
        sin="loading a sharded state dict changes nothing, and says nothing",
        thread="pytorch/pytorch#109648",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
    Mutant(
        name="IgnoresLocalStates",
        engine_spec="engine.mutants.wrapper_state:IgnoresLocalStates",
        sin="loading a local state dict changes nothing, and says nothing",
        thread="facebookresearch/fairscale#574",
        kills_on=_CALLED,
        trace=Trace.STATE,
    ),
)
