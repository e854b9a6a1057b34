"""The entries of mutants for whom a model is nothing but its forward."""

from __future__ import annotations

import torch

from engine.capability import Capability
from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Accumulation, Grouping, Plan

__all__ = ["MUTANTS"]

_GROUPS = Plan(grouping=Grouping.REQUIRED, units=("first,second",))
_METHODS = Plan(forward_methods=(("encoder", "encode"),), units=("encoder",))

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="NeverReducesParts",
        engine_spec="engine.mutants.parts:NeverReducesParts",
        sin="gradients of a part that was called by itself are never reduced",
        thread="NVIDIA/Megatron-LM#6693",
        kills_on=Condition(
            world_size=1,
            steps=2,
            plan=Plan(demands=frozenset({Capability.PARTS})),
            because="gradients of a whole forward are reduced",
        ),
    ),
    Mutant(
        name="NeverReducesGroupsRunInPart",
        engine_spec="engine.mutants.parts:NeverReducesGroupsRunInPart",
        sin="a group of which one module did not run has no gradients",
        thread="mindspore-ai/hyper-parallel#553",
        kills_on=Condition(world_size=1, steps=2, plan=_GROUPS, because="a group that runs whole is reduced"),
    ),
    Mutant(
        name="IgnoresTheFlagsOfGroups",
        engine_spec="engine.mutants.parts:IgnoresTheFlagsOfGroups",
        sin="groups of several modules reduce in every backward although they were told not to",
        thread="pytorch/torchtitan#3724",
        kills_on=Condition(
            steps=2,
            microbatches=2,
            plan=Plan(
                grouping=Grouping.REQUIRED,
                units=("first,second",),
                accumulation=Accumulation.LAST_MICROBATCH,
                demands=frozenset({Capability.UNIT_SYNC}),
            ),
            because="the only microbatch is also the last; counts hold from the second step on",
        ),
        trace=Trace.COMMUNICATION,
    ),
    Mutant(
        name="CastsTheFirstInputsAlone",
        engine_spec="engine.mutants.parts:CastsTheFirstInputsAlone",
        sin="of a group's modules the first alone has its inputs cast",
        thread="pytorch/pytorch#183702",
        kills_on=Condition(
            world_size=1,
            plan=Plan(grouping=Grouping.REQUIRED, units=("first,second",), compute_dtype=torch.bfloat16),
            because="in float32 there is nothing to cast",
        ),
        trace=Trace.CRASH,
    ),
    Mutant(
        name="IgnoresForwardMethods",
        engine_spec="engine.mutants.parts:IgnoresForwardMethods",
        sin="a method other than forward runs on sharded parameters",
        thread="pytorch/pytorch#109385",
        kills_on=Condition(plan=_METHODS, because="forward itself is attended to"),
        trace=Trace.CRASH,
    ),
    Mutant(
        name="NeverReducesForwardMethods",
        engine_spec="engine.mutants.parts:NeverReducesForwardMethods",
        sin="gradients of a module used through a method are never reduced",
        thread="pytorch/pytorch#123962",
        kills_on=Condition(plan=_METHODS, because="gradients by way of forward are reduced"),
    ),
)
