"""Mutants that compute, accumulate, store or communicate in another dtype than requested."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.reference import PreparedReference, ReferenceEngine
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine
from shardproof.engine.adapters.torch_replicate import ReplicateEngine
from shardproof.engine.contract import Layout, Plan, PreparedModel
from shardproof.engine.mutants.fsdp2_insides import reference_groups, reference_parameters
from shardproof.engine.mutants.fsdp2_interface import OwnFullyShard, OwnFullyShardAndReplicate, groups_of
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import after, changing, in_each
from shardproof.engine.reference.collectives import Division, PartialReduction, ReductionPlan
from shardproof.engine.reference.fsdp_state import state_of
from shardproof.engine.reference.param_group import FSDPParamGroup
from shardproof.engine.reference.parameter import FSDPParam


@mutant(after="pytorch/pytorch#190626", phase="reduce")
class ReducesInBfloat16(FullyShardEngine):
    """Gradients are reduced in bfloat16, whatever the plan is."""

    misreads = changing(reduce_dtype=torch.bfloat16)


@mutant(after="pytorch/pytorch#153077", trace=Trace.COMMUNICATION)
class KeepsFloat32OnTheWire(ReferenceEngine):
    """Gradients are reduced in float32, whatever the plan is."""

    misreads = changing(reduce_dtype=torch.float32)


@mutant(after="radixark/miles#1721", trace=Trace.COMMUNICATION)
class ForgetsTheReduceDtypeOfFrozenModels(FullyShardEngine):
    """Gradients of a model with frozen parameters are reduced in the compute dtype, whatever the plan is."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        if not all(p.requires_grad for p in model.parameters()):
            plan = replace(plan, reduce_dtype=None)
        return super().prepare(model, plan, mesh)


@mutant(after="pytorch/pytorch#190627", phase="replicate")
class ReducesReplicasInBfloat16(FullyShardEngine):
    """Across replicas gradients are reduced in bfloat16, whatever the plan is; within them as planned."""

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


@mutant(after="verl-project/verl#6150", trace=Trace.STATE)
class IgnoresTheComputeDtype(ReplicateEngine):
    """Forward and backward compute in the parameters' dtype although the plan has another."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Replicate honestly, under a plan with the same communication."""
        asked = replace(plan, compute_dtype=None, reduce_dtype=plan.reduction_dtype)
        return super().prepare(model, asked, mesh)


@mutant(after="deepspeedai/DeepSpeed#8066", trace=Trace.STATE)
class CastsBuffers(FullyShardEngine):
    """Buffers are cast to the compute dtype with the parameters, and lose their precision."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Cast floating-point buffers, then shard honestly."""
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if plan.compute_dtype is not None and buffer.is_floating_point():
                    setattr(module, name, buffer.to(plan.compute_dtype))
        return super().prepare(model, plan, mesh)


@mutant(after="pytorch/pytorch#153077", trace=Trace.STATE)
class ReturnsTheComputeDtype(FullyShardEngine):
    """The output has the compute dtype although the plan has another."""

    misreads = changing(output_dtype=None)


@mutant(after="pytorch/pytorch#160279", phase="hold")
class AccumulatesInBfloat16(ReferenceEngine):
    """The sum over microbatches is rounded to bfloat16 after each."""

    spoil = in_each(reference_parameters, "hold_unsharded_grad", lambda parameter: _rounding(parameter))


def _rounding(parameter: FSDPParam) -> Callable[[torch.dtype | None], None]:
    honest = parameter.hold_unsharded_grad

    def hold(dtype: torch.dtype | None) -> None:
        honest(dtype)
        _round(parameter)

    return hold


@mutant(after="pytorch/pytorch#190626", trace=Trace.NUMBERS, phase="reduce")
class ForgetsDtypesOfGradients(ReferenceEngine):
    """Gradients have the dtypes of their parameters, whatever their grad_dtype is."""

    class Prepared(OwnFullyShardAndReplicate):
        def spoil_module(self, module: Any) -> None:
            for held in (held for group in groups_of(module) for held in group.parameters):
                held.sharded_param.grad_dtype = held.local.dtype
                held._adopt_grad_dtype = lambda _: None
                held._grad_dtypes = ()


@mutant(after="huggingface/trl#6862", trace=Trace.SILENCE)
class AddsZerosOfAnyDtype(ReferenceEngine):
    """Zeros for unused parameters have the dtype of these where none is known, and ranks may differ."""

    class Prepared(OwnFullyShardAndReplicate):
        def spoil_module(self, module: Any) -> None:
            for group in groups_of(module):
                group._check_zeros = lambda: None


@mutant(after="pytorch/pytorch#190626", trace=Trace.NUMBERS, phase="forward")
class ComputesAlikeWithAllParameters(ReferenceEngine):
    """All parameters of a unit compute in one dtype, although a function leaves some in their own."""

    class Prepared(OwnFullyShard):
        def fully_shard(self, module: Any, **options: Any) -> Any:
            if "mp_policy" in options:
                options["mp_policy"] = replace(options["mp_policy"], param_dtype_override_fn=None)
            return super().fully_shard(module, **options)


@mutant(after="pytorch/pytorch#160279", phase="hold")
class SumsReplicasInTheReduceDtype(ReferenceEngine):
    """Gradients that wait for the all-reduce over replicas are summed over microbatches in the reduce dtype."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Prepare honestly; round the waiting gradients after each microbatch."""
        prepared = super().prepare(model, plan, mesh)
        if plan.reduce_dtype is not None:
            for group in reference_groups(prepared):
                after(group._partial, "add", partial(_round_sums, plan.reduce_dtype))
        return prepared


def _round_sums(dtype: torch.dtype, waiting: PartialReduction) -> None:
    for parameter, total in waiting._sums.items():
        waiting._sums[parameter] = total.to(dtype)


@mutant(after="pytorch/torchtitan#2318", phase="reduce")
class DividesFloat16AfterTheSum(ReferenceEngine):
    """Gradients in float16 are divided when their sum has overflowed."""

    spoil = in_each(reference_groups, "_reduction_plan", lambda group: _dividing_late(group))


def _dividing_late(group: FSDPParamGroup) -> Callable[[Sequence[FSDPParam], torch.dtype], ReductionPlan]:
    honest = group._reduction_plan

    def plan(chosen: Sequence[FSDPParam], dtype: torch.dtype) -> ReductionPlan:
        made = honest(chosen, dtype)
        is_early = dtype is torch.float16
        return replace(made, division=Division(after=made.division.total)) if is_early else made

    return plan


@mutant(after="pytorch/pytorch#143277", trace=Trace.CRASH)
class CastsInputsOfTheFirstModuleAlone(ReferenceEngine):
    """Of several modules in one group only the first has its inputs cast."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Prepare honestly; pass later modules of a group their original inputs."""
        prepared = super().prepare(model, plan, mesh)
        for unit in plan.units:
            for name in unit.split(",")[1:]:
                # Before the engine's own hook, and undone after it.
                kept: list[Any] = []
                module = model.get_submodule(name)
                module.register_forward_pre_hook(_keeping(kept), prepend=True)
                module.register_forward_pre_hook(_giving_back(kept))
        return prepared


# Any: a module's inputs are of any type.
def _keeping(kept: list[Any]) -> Callable[[nn.Module, Any], None]:
    def keep(module: nn.Module, inputs: Any) -> None:
        kept[:] = [inputs]

    return keep


def _giving_back(kept: list[Any]) -> Callable[[nn.Module, Any], Any]:
    def recycle(module: nn.Module, inputs: Any) -> Any:
        return kept.pop()

    return recycle


class _PreparedEarly(PreparedReference):
    def convert(self, dtype: torch.dtype) -> None:
        super().convert(dtype)
        for group in reference_groups(self):
            group._dtypes = replace(group._dtypes, reduce_dtype=torch.float32)  # type: ignore[type-var]  # a dataclass, by its Protocol


@mutant(after="pytorch/pytorch#143277", phase="reduce")
class ReducesInTheDtypeOfBefore(ReferenceEngine):
    """A model that was converted after it was prepared is reduced in float32."""

    prepared_type = _PreparedEarly


@mutant(after="pytorch/pytorch#91365", trace=Trace.STATE)
class IgnoresTheDtypeOfAUnit(ReferenceEngine):
    """A unit computes in the dtype of the others, whatever its own policy is."""

    misreads = changing(unit_dtypes=())


@mutant(after="pytorch/torchtitan#2881", trace=Trace.STATE)
class CastsInputsUnasked(ReferenceEngine):
    """Inputs of a unit are cast to its dtype, although its policy leaves them unchanged."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        casting = tuple(replace(dtypes, casts_inputs=True) for dtypes in plan.unit_dtypes)
        return super().prepare(model, replace(plan, unit_dtypes=casting), mesh)


@mutant(after="pytorch/pytorch#99545", trace=Trace.STATE)
class CastsNothingAtEmptyRoots(ReferenceEngine):
    """The inputs of a root whose units have all parameters stay as they are."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        state: Any = state_of(prepared.module)
        if not state.param_groups:
            state.dtypes = replace(state.dtypes, cast_forward_inputs=False)
        return prepared


@mutant(after="NVIDIA-NeMo/Automodel#3657", trace=Trace.STATE)
class PassesTheRootsOutputDtypeOn(ReferenceEngine):
    """The outputs of a unit that has dtypes of its own, but none for outputs, get the dtype of the root's."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        passed_on = tuple(
            replace(own, output_dtype=own.output_dtype or plan.output_dtype) for own in plan.unit_dtypes
        )
        return super().prepare(model, replace(plan, unit_dtypes=passed_on), mesh)


def _round(parameter: FSDPParam) -> None:
    whole = parameter.unsharded_param
    if whole is not None and whole.grad is not None:
        whole.grad.copy_(whole.grad.bfloat16())


# Any: FSDP2's methods are in a class that modules receive at run time.
def _managed(prepared: PreparedModel) -> list[Any]:
    return [m for m in prepared.module.modules() if hasattr(m, "set_all_reduce_hook")]


@mutant(after="huggingface/accelerate#3844", phase="prepare")
class StoresWhatIsFrozenInFull(FullyShardEngine):
    """Where units compute in another dtype, frozen parameters of few bits are stored in float32."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        few = [p for p in model.parameters() if p.dtype is torch.bfloat16 and not p.requires_grad]
        for parameter in few if plan.compute_dtype is not None else []:
            parameter.data = parameter.data.float()
        return super().prepare(model, plan, mesh)


@mutant(after="NVIDIA/Megatron-LM#4800", phase="step")
class LosesLaterGroupsOfFewBits(ReferenceEngine):
    """In groups of parameters after the first, those trained in few bits are zeros after a step."""

    class Prepared(PreparedReference):
        @torch.no_grad()
        def step(self) -> None:
            super().step()
            for group in self.built_optimizer().param_groups[1:]:
                for parameter in (
                    p for p in group["params"] if p.dtype is torch.bfloat16 and p.requires_grad
                ):
                    parameter.zero_()
