"""Mutants that cut parameters wrongly: along another dim, into other shares, or over other axes of a hybrid layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from shardproof.engine.adapters.reference import ReferenceEngine
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from shardproof.engine.contract import (
    Layout,
    Placement,
    Plan,
    PreparedModel,
    Replicas,
    Reshard,
    Shard,
    shard_of,
)
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import (
    changing,
    dividing_losses,
    holding_nothing_back,
    leave_out_of_ddp,
)


@mutant(after="pytorch/torchtitan#1483", trace=Trace.STATE)
class ShardsTheFirstDim(ReferenceEngine):
    """The first dim is sharded, whatever the plan's dim is."""

    misreads = changing(placement=Placement.FIRST)


@mutant(after="Tencent-Hunyuan/UniRL#410", trace=Trace.SILENCE)
class DropsWhatTheLayoutExcludes(ReferenceEngine):
    """Of two options that exclude each other one is silently ignored."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        plan.refuse_beyond(self.capabilities)
        return super().prepare(model, replace(plan, placement=Placement.FIRST, reshard=Reshard.NATIVE), mesh)


@mutant(after="pytorch/torchtitan#1483", phase="gather")
class ReassemblesAlongTheFirstDim(ReferenceEngine):
    """Shards of the second dim are reassembled as if they were shards of the first."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        num_shards = mesh.size(mesh.ndim - 1)
        for module, name, parameter in _parameters(model):
            if _sharded_dim(parameter) == 1:
                module.register_forward_pre_hook(_permuting(name, num_shards))
        return prepared


def _permuting(name: str, num_shards: int) -> Callable[[nn.Module, Any], None]:
    def permute(module: nn.Module, inputs: Any) -> None:
        whole = module.get_parameter(name)
        with torch.no_grad():
            pieces = [piece.reshape(-1) for piece in whole.detach().chunk(num_shards, dim=1)]
            whole.copy_(torch.cat(pieces).view(whole.shape))

    return permute


@mutant(after="Lightning-AI/lightning-thunder#908", trace=Trace.CRASH)
class ShowsPaddingRows(FullyShardEngine):
    """Forward uses the padding rows of the last weight."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        num_shards = mesh.size(mesh.ndim - 1)
        *_, (module, name) = ((m, n) for m, n, p in _parameters(model) if p.dim() == 2)
        # No Parameter: gradients reach the engine's own, which has the first rows.
        _show(module, name, lambda whole: functional.pad(whole, (0, 0, 0, -len(whole) % num_shards)))
        return prepared


@mutant(after="pytorch/torchtitan#4593", trace=Trace.STATE)
class InfersTheSizeFromItsShard(FullyShardEngine):
    """If ranks do not divide the rows, a wrong number is inferred from a rank's own."""

    class Prepared(PreparedFullyShard):
        def local_gradients(self) -> Mapping[str, Shard | None]:
            return {
                name: None if p.grad is None else _inferred(p.grad)
                for name, p in self.named.named_parameters()
            }


def _inferred(tensor: torch.Tensor) -> Shard:
    honest = shard_of(tensor)
    if not isinstance(tensor, DTensor):
        return honest
    num_shards = tensor.device_mesh.size(tensor.device_mesh.ndim - 1)
    rows = honest.tensor.shape[0] * num_shards
    return replace(honest, global_shape=(rows, *honest.global_shape[1:]))


@mutant(after="pytorch/torchtitan#1483", trace=Trace.STATE)
class ShowsStridedParameters(ReferenceEngine):
    """Forward uses parameters whose memory is not in the order of their shape."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        for module, name, parameter in _parameters(model):
            if parameter.dim() == 2:
                _show(module, name, lambda whole: whole.t().contiguous().t())
        return prepared


def _show(module: nn.Module, name: str, change: Callable[[torch.Tensor], Any]) -> None:
    """Replace a parameter in the module's forward."""

    wholes: list[nn.Parameter] = []

    def put(_: nn.Module, inputs: Any) -> None:
        whole = module._parameters[name]
        assert whole is not None
        wholes.append(whole)
        module._parameters[name] = change(whole)

    def put_back(*_: object) -> None:
        module._parameters[name] = wholes.pop()

    module.register_forward_pre_hook(put)
    module.register_forward_hook(put_back, prepend=True)


def _parameters(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
    ]


def _sharded_dim(parameter: nn.Parameter) -> int:
    placement = parameter.placements[-1] if isinstance(parameter, DTensor) else None
    return getattr(placement, "dim", 0)


@mutant(after="pytorch/pytorch#144045", phase="reduce")
class GivesSmallParametersNoGradient(FullyShardEngine):
    """The gradient of a parameter of one element is zero."""

    class Prepared(PreparedFullyShard):
        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss)
            for parameter in self.named.parameters():
                if isinstance(parameter.grad, DTensor) and parameter.grad.numel() == 1:
                    parameter.grad.to_local().zero_()


@mutant(after="deepspeedai/DeepSpeed#202", phase="reduce")
class ForgetsScalars(DistributedDataParallelEngine):
    """Parameters of no dim are left out of every reduction."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        leave_out_of_ddp(model, [name for name, p in model.named_parameters() if not p.dim()])
        return super().prepare(model, plan, mesh)


@mutant(after="deepspeedai/DeepSpeed#8279", phase="reduce")
class MistakesTheNeighbourOfAnEmptyParameter(DistributedDataParallelEngine):
    """The parameter after an empty one is left out of every reduction."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        neighbours = pairwise(model.named_parameters())
        leave_out_of_ddp(model, [name for (_, before), (name, _) in neighbours if not before.numel()])
        return super().prepare(model, plan, mesh)


@mutant(after="verl-project/verl#7493", phase="replicate")
class NeverSynchronisesReplicas(FullyShardEngine):
    """Gradients are reduced within a replica, never between replicas."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        return super().prepare(model, plan, mesh["shard"] if _is_hybrid(plan) else mesh)


@mutant(after="pytorch/pytorch#154888", phase="replicate")
class NeverSynchronisesSingles(FullyShardEngine):
    """If each replica is a single rank, its gradients are not reduced."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        is_single = _is_hybrid(plan) and mesh["shard"].size() == 1
        return super().prepare(model, plan, mesh["shard"] if is_single else mesh)


@mutant(after="Tencent-Hunyuan/UniRL#410", trace=Trace.COMMUNICATION)
class ShardsOverReplicas(FullyShardEngine):
    """Under a hybrid layout parameters are sharded over all ranks."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        plan.refuse_beyond(self.capabilities)
        if _is_hybrid(plan):
            plan = replace(plan, layout=Layout.SHARD, replicas=Replicas.TWO)
            mesh = init_device_mesh(mesh.device_type, (mesh.size(),), mesh_dim_names=("shard",))
        return super().prepare(model, plan, mesh)


@mutant(after="pytorch/torchtitan#2318", phase="backward")
class DividesOneReplicaTwice(FullyShardEngine):
    """If there is one replica, gradients are divided by the number of its shards a second time."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        is_one = _is_hybrid(plan) and mesh["replicate"].size() == 1
        return dividing_losses(super().prepare(model, plan, mesh), mesh.size() if is_one else 1)


@mutant(after="pytorch/torchtitan#1483", trace=Trace.COMMUNICATION)
class TransposesTheMesh(FullyShardEngine):
    """A hybrid layout shards over its replicas and replicates over its shards."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        if _is_hybrid(plan):
            mesh = DeviceMesh(mesh.device_type, mesh.mesh.T, mesh_dim_names=("replicate", "shard"))
        return super().prepare(model, plan, mesh)


@mutant(after="NVIDIA/cosmos-framework#161", trace=Trace.COMMUNICATION)
class ReducesReplicasEveryMicrobatch(FullyShardEngine):
    """Under a hybrid layout gradients are reduced after each microbatch although the plan accumulates."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        return holding_nothing_back(prepared) if _is_hybrid(plan) else prepared


def _is_hybrid(plan: Plan) -> bool:
    return plan.layout is Layout.HYBRID
