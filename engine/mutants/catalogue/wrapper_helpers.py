"""The entries of mutants of what stands beside FullyShardedDataParallel."""

from __future__ import annotations

from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Layout, Plan
from engine.wrapper import Wrapper

__all__ = ["MUTANTS"]

_PLAN = Plan(layout=Layout.SHARD, wrapper=Wrapper())


def _mutant(
    name: str, sin: str, thread: str, because: str, trace: Trace = Trace.STATE, ranks: int = 2
) -> Mutant:
    return Mutant(
        name=name,
        engine_spec=f"engine.mutants.wrapper_helpers:{name}",
        sin=sin,
        thread=thread,
        kills_on=Condition(world_size=ranks, plan=_PLAN, because=because),
        trace=trace,
    )


MUTANTS: tuple[Mutant, ...] = (
    _mutant(
        "IgnoresMixedPrecision",
        "everything is computed and reduced in full precision",
        "verl-project/verl#6150",
        "only low precision shows it",
    ),
    _mutant(
        "ComputesInBfloat16Unasked",
        "a precision that names no dtype computes in bfloat16",
        "pytorch/pytorch#143277",
        "a dtype that is named is honoured",
    ),
    _mutant(
        "ComputesInTheReduceDtype",
        "forward computes in the dtype to reduce in",
        "pytorch/pytorch#153077",
        "without one it is honest",
    ),
    _mutant(
        "ReducesInTheComputeDtype",
        "the dtype to reduce in has no effect",
        "pytorch/pytorch#190626",
        "it may be that of computation anyway",
        Trace.NUMBERS,
    ),
    _mutant(
        "IgnoresCastFlags",
        "the flags that say which inputs are cast have no effect",
        "pytorch/pytorch#160279",
        "their defaults are honoured",
    ),
    _mutant(
        "KeepsLowGradients",
        "gradients stay in low precision unasked",
        "huggingface/transformers#34645",
        "only low precision shows it",
    ),
    _mutant(
        "CastsBatchNorm",
        "BatchNorm computes in low precision",
        "pytorch/pytorch#196996",
        "only low precision shows it",
    ),
    _mutant(
        "RoundsTheShards",
        "shards are kept in low precision",
        "pytorch/torchtitan#724",
        "only low precision shows it",
    ),
    _mutant(
        "GivesUnitsNoOptions",
        "units that a policy names by class have another strategy and form than the root",
        "speechbrain/speechbrain#2010",
        "the root has its options",
    ),
    _mutant(
        "IgnoresOverridesOfAPolicy",
        "options that a policy gives to one unit have no effect",
        "NVIDIA/cosmos-framework#162",
        "other options are those of the root",
    ),
    _mutant(
        "IgnoresStateConfigs",
        "configs of state dicts have no effect",
        "Lightning-AI/lightning-thunder#908",
        "their defaults are honoured",
    ),
    _mutant(
        "GivesShardsForWholes",
        "a full state dict is a sharded one",
        "facebookresearch/fairscale#601",
        "other types are honoured",
    ),
    _mutant(
        "GivesWholesForShards",
        "a sharded state dict is a full one",
        "pytorch/pytorch#136228",
        "other types are honoured",
    ),
    _mutant(
        "NumbersStateByName",
        "ids of optimizer state follow the alphabet",
        "pytorch/pytorch#54736",
        "names are right",
    ),
    _mutant(
        "KeepsOverflowLocal",
        "a rank skips a step by itself when its gradients are infinite",
        "pytorch/pytorch#115710",
        "finite gradients are nobody else's business",
    ),
    _mutant(
        "DividesWrappedGradientsTwice",
        "wrapped gradients are divided by the number of ranks twice",
        "NVIDIA/Megatron-LM#3023",
        "a lone rank divides by one",
        Trace.NUMBERS,
    ),
    _mutant(
        "ReducesDespiteNoSync",
        "wrapped microbatches are all reduced within no_sync",
        "Haian-Jin/LVSM#22",
        "the last microbatch is reduced anyway",
        Trace.COMMUNICATION,
    ),
)
