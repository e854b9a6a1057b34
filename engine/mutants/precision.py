"""Mutants that compute, accumulate, keep or communicate in another dtype than was asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine.adapters.reference import PreparedReference, ReferenceEngine
from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.adapters.torch_replicate import ReplicateEngine
from engine.contract import Layout, Plan, PreparedModel
from engine.mutants.accumulation import Forgetful
from engine.mutants.groups import groups_of
from engine.reference.division import Division
from engine.reference.group import Group
from engine.reference.parameter import ManagedParameter
from engine.reference.reduction import ReductionPlan

__all__ = [
    "AccumulatesInBfloat16",
    "CastsInputsOfTheFirstModuleAlone",
    "DividesFloat16AfterTheSum",
    "ForgetsMicrobatchesInLowPrecision",
    "IgnoresTheComputeDtype",
    "KeepsFloat32OnTheWire",
    "KeepsNoMasterWeights",
    "ReducesInBfloat16",
    "ReducesInTheDtypeOfBefore",
    "ReducesReplicasInBfloat16",
    "ReturnsTheComputeDtype",
    "RoundsWhereDtypesAreMixed",
]


class ReducesInBfloat16(FullyShardEngine):
    """Gradients lose 16 of their 24 significant bits on the way, whatever dtype the plan names.

    After pytorch/pytorch#190626: the reduction ran before the cast to the dtype asked for.
    """

    name = "mutant.ReducesInBfloat16"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, under another plan."""
        return super().prepare(model, replace(plan, reduce_dtype=torch.bfloat16), mesh)


class KeepsFloat32OnTheWire(ReferenceEngine):
    """Gradients are reduced in float32 whatever was asked: twice the bytes, and numbers better than asked.

    After pytorch/pytorch#153077: the dtype of the reduction was settled before the one asked for was known.
    """

    name = "mutant.KeepsFloat32OnTheWire"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Prepare honestly, under another plan."""
        return super().prepare(model, replace(plan, reduce_dtype=torch.float32), mesh)


class ReducesReplicasInBfloat16(FullyShardEngine):
    """Within a replica gradients are reduced as asked, across replicas in bfloat16.

    After pytorch/pytorch#190627: of two reductions one knew nothing of the dtype asked for.
    """

    name = "mutant.ReducesReplicasInBfloat16"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard each replica honestly, and reduce across replicas in a hook of our own."""
        if plan.layout is not Layout.HYBRID:
            return super().prepare(model, plan, mesh)
        group = mesh.get_group("replicate")

        def reduce_across(gradients: torch.Tensor) -> None:
            rounded = gradients.bfloat16()
            dist.all_reduce(rounded, dist.ReduceOp.AVG, group=group)
            gradients.copy_(rounded)

        prepared = super().prepare(model, plan, mesh["shard"])
        for module in _managed(prepared):
            module.set_all_reduce_hook(reduce_across)
        return prepared


class IgnoresTheComputeDtype(ReplicateEngine):
    """Everything is computed in the parameters' own dtype, more exactly than was asked, and more slowly.

    After verl-project/verl#6150: the dtype of the policy never reached the forward pass.
    """

    name = "mutant.IgnoresTheComputeDtype"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Replicate honestly, under a plan that still communicates as asked."""
        asked = replace(plan, compute_dtype=None, reduce_dtype=plan.reduction_dtype)
        return super().prepare(model, asked, mesh)


class ReturnsTheComputeDtype(FullyShardEngine):
    """The output is in the dtype of the computation, whatever dtype was asked for.

    After pytorch/pytorch#153077: which casts were made was decided too early, and differed from what was said.
    """

    name = "mutant.ReturnsTheComputeDtype"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, under a plan without a dtype for the output."""
        return super().prepare(model, replace(plan, output_dtype=None), mesh)


class _PreparedWithoutMasters(PreparedFullyShard):
    @torch.no_grad()
    def step(self) -> None:
        super().step()
        if self.plan.compute_dtype is not None:
            for parameter in self.named.parameters():
                parameter.copy_(parameter.to(self.plan.compute_dtype))


class KeepsNoMasterWeights(FullyShardEngine):
    """What the optimizer updates is as coarse as what forward computes with: small updates are lost.

    After huggingface/transformers#34645: with mixed precision, parameters and gradients were not in the dtype
    that the optimizer was to work in.
    """

    name = "mutant.KeepsNoMasterWeights"
    prepared_type = _PreparedWithoutMasters


class _PreparedForgetfulInLowPrecision(Forgetful, PreparedFullyShard):
    pass


class ForgetsMicrobatchesInLowPrecision(FullyShardEngine):
    """Where another dtype computes, each backward discards the microbatches before it.

    After ServiceNow/Fast-LLM#550: one of the branches that hand gradients on did not know that it had to add.
    """

    name = "mutant.ForgetsMicrobatchesInLowPrecision"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly; in low precision each backward clears what was there."""
        honest = super().prepare(model, plan, mesh)
        is_low = plan.compute_dtype is not None
        return _PreparedForgetfulInLowPrecision(honest.module, plan) if is_low else honest


class AccumulatesInBfloat16(ReferenceEngine):
    """What microbatches add up to until the last one is rounded to bfloat16 after each.

    After pytorch/pytorch#160279: of gradients accumulated over microbatches some had another dtype than others.
    """

    name = "mutant.AccumulatesInBfloat16"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Prepare honestly; round what each group holds."""
        prepared = super().prepare(model, plan, mesh)
        for group in groups_of(prepared):
            for parameter in group.parameters:
                parameter.hold_gradient = _rounding(parameter)  # type: ignore[method-assign, assignment]  # of this object alone
        return prepared


def _rounding(parameter: ManagedParameter) -> Callable[[torch.dtype | None], None]:
    honest = parameter.hold_gradient

    def hold(dtype: torch.dtype | None) -> None:
        honest(dtype)
        parameter._held = _rounded(parameter._held)

    return hold


class RoundsWhereDtypesAreMixed(ReferenceEngine):
    """Where one parameter's gradient was accumulated and another's is fresh, both are packed as the fresh one is.

    After pytorch/pytorch#196996: a parameter that the last microbatch alone used had another dtype than those
    that it was reduced with.
    """

    name = "mutant.RoundsWhereDtypesAreMixed"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Prepare honestly; look at what each group is about to reduce."""
        prepared = super().prepare(model, plan, mesh)
        for group in groups_of(prepared):
            group.reduce_gradients = _packing(group)  # type: ignore[method-assign]  # of this object alone
        return prepared


def _packing(group: Group) -> Callable[[], None]:
    honest = group.reduce_gradients

    def reduce_gradients() -> None:
        held = [p for p in group.parameters if p._held is not None]
        if group.reduces and 0 < len(held) < len(group.parameters):
            for parameter in held:
                parameter._held = _rounded(parameter._held)
        honest()

    return reduce_gradients


class DividesFloat16AfterTheSum(ReferenceEngine):
    """Gradients in float16 are added as they are, and divided by the number of ranks when they have overflowed.

    After pytorch/torchtitan#2318: the division was moved to another place, and not every mode followed.
    """

    name = "mutant.DividesFloat16AfterTheSum"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Prepare honestly; put all of the division behind the sum."""
        prepared = super().prepare(model, plan, mesh)
        for group in groups_of(prepared):
            group._reduction_plan = _dividing_late(group)  # type: ignore[method-assign, assignment]  # of this object alone
        return prepared


def _dividing_late(group: Group) -> Callable[[torch.dtype], ReductionPlan]:
    honest = group._reduction_plan

    def plan(dtype: torch.dtype) -> ReductionPlan:
        made = honest(dtype)
        is_early = dtype is torch.float16
        return replace(made, division=Division(after=made.division.total)) if is_early else made

    return plan


class CastsInputsOfTheFirstModuleAlone(ReferenceEngine):
    """Of several modules that form one group only the first has its inputs cast.

    After pytorch/pytorch#143277: the dtype to which inputs are cast was settled in one place, too early.
    """

    name = "mutant.CastsInputsOfTheFirstModuleAlone"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Prepare honestly; hand later modules of a group their inputs as they were."""
        prepared = super().prepare(model, plan, mesh)
        for unit in plan.units:
            for name in unit.split(",")[1:]:
                # In front of the engine's own hook, and undone behind it.
                kept: list[Any] = []
                module = model.get_submodule(name)
                module.register_forward_pre_hook(_keeping(kept), prepend=True)
                module.register_forward_pre_hook(_giving_back(kept))
        return prepared


# Any: a module takes what it likes.
def _keeping(kept: list[Any]) -> Callable[[nn.Module, Any], None]:
    def keep(module: nn.Module, inputs: Any) -> None:
        kept[:] = [inputs]

    return keep


def _giving_back(kept: list[Any]) -> Callable[[nn.Module, Any], Any]:
    def give_back(module: nn.Module, inputs: Any) -> Any:
        return kept.pop()

    return give_back


class _PreparedEarly(PreparedReference):
    def convert(self, dtype: torch.dtype) -> None:
        super().convert(dtype)
        for group in groups_of(self):
            group._dtypes = replace(group._dtypes, reduce_dtype=torch.float32)  # type: ignore[type-var]  # a dataclass, by its Protocol


class ReducesInTheDtypeOfBefore(ReferenceEngine):
    """A model that was converted when it was prepared already is still reduced in the dtype it had before.

    After pytorch/pytorch#143277: the dtype of the reduction was settled before the parameters had theirs.
    """

    name = "mutant.ReducesInTheDtypeOfBefore"
    prepared_type = _PreparedEarly


def _rounded(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.bfloat16().to(tensor.dtype)


# Any: FSDP2's methods sit on a class that modules are given at run time.
def _managed(prepared: PreparedModel) -> list[Any]:
    return [m for m in prepared.module.modules() if hasattr(m, "set_all_reduce_hook")]
