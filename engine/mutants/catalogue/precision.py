"""The entries of mutants that compute, accumulate, keep or communicate in another dtype than was asked."""

from __future__ import annotations

import torch

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Accumulation, Grouping, Layout, Plan

__all__ = ["MUTANTS"]

_LOW = Plan(compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_ACCUMULATING = Plan(
    compute_dtype=torch.bfloat16, reduce_dtype=torch.float32, accumulation=Accumulation.LAST_MICROBATCH
)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="ReducesInBfloat16",
        engine_spec="engine.mutants.precision:ReducesInBfloat16",
        sin="gradients are reduced in bfloat16 whatever was asked",
        thread="pytorch/pytorch#190626",
        kills_on=Condition(
            world_size=1, because="gradients that bfloat16 holds exactly hide it from numbers"
        ),
    ),
    Mutant(
        name="KeepsFloat32OnTheWire",
        engine_spec="engine.mutants.precision:KeepsFloat32OnTheWire",
        sin="gradients are reduced in float32 whatever was asked",
        thread="pytorch/pytorch#153077",
        kills_on=Condition(steps=2, plan=Plan(reduce_dtype=torch.bfloat16), because="one rank sends nothing"),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="ReducesReplicasInBfloat16",
        engine_spec="engine.mutants.precision:ReducesReplicasInBfloat16",
        sin="across replicas gradients are reduced in bfloat16 whatever was asked, within them as asked",
        thread="pytorch/pytorch#190627",
        kills_on=Condition(plan=Plan(layout=Layout.HYBRID), because="only a hybrid layout has replicas"),
    ),
    Mutant(
        name="IgnoresTheComputeDtype",
        engine_spec="engine.mutants.precision:IgnoresTheComputeDtype",
        sin="forward and backward compute in the parameters' dtype although another was asked for",
        thread="verl-project/verl#6150",
        kills_on=Condition(
            world_size=1,
            plan=_LOW,
            because="the numbers are better than asked: only what is returned shows it",
        ),
        trace=Trace.STATE,
    ),
    Mutant(
        name="ReturnsTheComputeDtype",
        engine_spec="engine.mutants.precision:ReturnsTheComputeDtype",
        sin="the output is in the dtype of the computation although another was asked for",
        thread="pytorch/pytorch#153077",
        kills_on=Condition(
            world_size=1,
            plan=Plan(compute_dtype=torch.bfloat16, output_dtype=torch.float32),
            because="an output that nobody asked to be cast is not cast",
        ),
        trace=Trace.STATE,
    ),
    Mutant(
        name="KeepsNoMasterWeights",
        engine_spec="engine.mutants.precision:KeepsNoMasterWeights",
        sin="updated parameters are rounded to the dtype of the computation",
        thread="huggingface/transformers#34645",
        kills_on=Condition(world_size=1, plan=_LOW, because="in one dtype there is nothing to round"),
    ),
    Mutant(
        name="ForgetsMicrobatchesInLowPrecision",
        engine_spec="engine.mutants.precision:ForgetsMicrobatchesInLowPrecision",
        sin="where another dtype computes, each backward discards the microbatches before it",
        thread="ServiceNow/Fast-LLM#550",
        kills_on=Condition(
            world_size=1, microbatches=2, plan=_LOW, because="a single microbatch is the last"
        ),
    ),
    Mutant(
        name="AccumulatesInBfloat16",
        engine_spec="engine.mutants.precision:AccumulatesInBfloat16",
        sin="the sum over microbatches is rounded to bfloat16 after each",
        thread="pytorch/pytorch#160279",
        kills_on=Condition(
            world_size=1, microbatches=3, plan=_ACCUMULATING, because="one microbatch is no sum"
        ),
    ),
    Mutant(
        name="RoundsWhereDtypesAreMixed",
        engine_spec="engine.mutants.precision:RoundsWhereDtypesAreMixed",
        sin="accumulated gradients are rounded to the dtype of a fresh one beside which they are reduced",
        thread="pytorch/pytorch#196996",
        kills_on=Condition(
            world_size=1,
            microbatches=3,
            plan=_ACCUMULATING,
            because="needs a parameter that the last microbatch alone uses",
        ),
    ),
    Mutant(
        name="DividesFloat16AfterTheSum",
        engine_spec="engine.mutants.precision:DividesFloat16AfterTheSum",
        sin="gradients in float16 are divided when their sum has overflowed",
        thread="pytorch/torchtitan#2318",
        kills_on=Condition(plan=Plan(reduce_dtype=torch.float16), because="one rank's gradients are no sum"),
    ),
    Mutant(
        name="CastsInputsOfTheFirstModuleAlone",
        engine_spec="engine.mutants.precision:CastsInputsOfTheFirstModuleAlone",
        sin="of several modules in one group only the first has its inputs cast",
        thread="pytorch/pytorch#143277",
        kills_on=Condition(
            world_size=1,
            plan=Plan(
                compute_dtype=torch.bfloat16,
                units=("first,last",),
                grouping=Grouping.REQUIRED,
            ),
            because="needs a model that widens what lies between the two",
        ),
        trace=Trace.CRASH,
    ),
    Mutant(
        name="ReducesInTheDtypeOfBefore",
        engine_spec="engine.mutants.precision:ReducesInTheDtypeOfBefore",
        sin="a model that was converted after it was prepared is reduced in float32",
        thread="pytorch/pytorch#143277",
        kills_on=Condition(
            world_size=1,
            plan=Plan(demands=frozenset({Capability.CONVERT})),
            because="a model that stays as it was prepared is reduced in its own dtype",
        ),
    ),
)
