"""The entries of mutants that treat what forward is called with in their own way."""

from __future__ import annotations

import torch

from engine.mutants.mutant import Condition, Mutant, Trace
from engine.plan import Layout, Plan

__all__ = ["MUTANTS"]

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="DetachesNestedInputs",
        engine_spec="engine.mutants.inputs:DetachesNestedInputs",
        sin="tensors in a tuple reach a unit without their history",
        thread="facebookresearch/fairscale#1191",
        kills_on=Condition(world_size=1, because="inputs in a row keep theirs, and data have none"),
    ),
    Mutant(
        name="CastsOuterInputsAlone",
        engine_spec="engine.mutants.inputs:CastsOuterInputsAlone",
        sin="tensors in a tuple are not converted to the dtype to compute in",
        thread="pytorch/pytorch#91078",
        kills_on=Condition(
            world_size=1,
            plan=Plan(layout=Layout.SHARD, compute_dtype=torch.bfloat16),
            because="in the parameters' own dtype there is nothing to convert",
        ),
        trace=Trace.CRASH,
    ),
    Mutant(
        name="ReducesOnlyAfterInputs",
        engine_spec="engine.mutants.inputs:ReducesOnlyAfterInputs",
        sin="a forward without arguments is followed by no reduction",
        thread="pytorch/pytorch#129259",
        kills_on=Condition(because="a model whose forward takes inputs trains like any other"),
    ),
)
