"""Mutants that mistreat some parameters: unused, frozen, ignored ones, or those of one rank."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from shardproof.engine.adapters.reference import ReferenceEngine
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from shardproof.engine.adapters.torch_replicate import ReplicateEngine
from shardproof.engine.contract import Capability, Plan, PreparedModel
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import (
    changing,
    is_last_rank,
    leave_out_of_ddp,
    never_updating,
    undemanding,
)


@mutant(after="facebookresearch/fairscale#605", phase="reduce")
class GivesZerosToUnusedParameters(FullyShardEngine):
    """Parameters that no loss reached have a gradient of zeros."""

    class Prepared(PreparedFullyShard):
        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss)
            for parameter in self.named.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)


@mutant(after="pytorch/pytorch#158719", trace=Trace.COMMUNICATION)
class ReducesWhatEachRankUsed(FullyShardEngine):
    """Each rank reduces only the gradients that it has."""

    misreads = undemanding(Capability.RANK_DEPENDENT)


@mutant(after="pytorch/torchtitan#4593", phase="step")
class TrainsFrozenParameters(FullyShardEngine):
    """Frozen parameters are trained."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        return super().prepare(model.requires_grad_(), plan, mesh)


@mutant(after="pytorch/pytorch#95805", trace=Trace.COMMUNICATION)
class NeverFreesFrozenUnits(FullyShardEngine):
    """Units of frozen parameters stay gathered permanently."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule) and not any(p.requires_grad for p in module.parameters()):
                module.set_reshard_after_forward(False, recurse=False)
                module.set_reshard_after_backward(False, recurse=False)
        return prepared


@mutant(after="Tencent-Hunyuan/UniRL#410", trace=Trace.STATE)
class ShardsIgnoredParameters(FullyShardEngine):
    """Ignored parameters are sharded."""

    misreads = changing(ignored=())


@mutant(after="pytorch/pytorch#117924", trace=Trace.STATE)
class ReducesIgnoredGradients(FullyShardEngine):
    """Gradients of ignored parameters that train are summed over the ranks."""

    class Prepared(PreparedFullyShard):
        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss)
            for name in self.plan.ignored:
                gradient = self.named.get_parameter(name).grad
                if gradient is not None:
                    dist.all_reduce(gradient)


@mutant(after="NVIDIA/cosmos-framework#162", trace=Trace.STATE)
class ShardsWhatItShouldReplicate(ReferenceEngine):
    """Units that should be replicated beside sharded ones are sharded."""

    misreads = changing(replicated=())


@mutant(after="pytorch/pytorch#68803", trace=Trace.COMMUNICATION)
class IgnoresMoreOnTheLastRank(FullyShardEngine):
    """The last rank ignores a parameter that the others shard."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        *_, last = (name for name, _ in model.named_parameters())
        if is_last_rank() and mesh.size() > 1:
            plan = replace(plan, ignored=(*plan.ignored, last))
        return super().prepare(model, plan, mesh)


@mutant(after="pytorch/pytorch#63916", phase="reduce")
class ForgetsToSynchroniseOneParameter(DistributedDataParallelEngine):
    """The last parameter is left out of every reduction.

    Needs a model of two parameters or more.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        *_, forgotten = (name for name, _ in model.named_parameters())
        leave_out_of_ddp(model, [forgotten])
        return super().prepare(model, plan, mesh)


@mutant(after="pytorch/pytorch#149205", phase="step")
class NeverUpdatesOneParameter(ReplicateEngine):
    """The optimizer's update of the last parameter is lost."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        return never_updating(prepared, [*prepared.named.parameters()][-1:])


@mutant(after="pytorch/pytorch#176076", phase="step")
class NeverUpdatesTheLastRanksRows(FullyShardEngine):
    """The rows of the last rank keep their initial values."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        num_shards = mesh.size(mesh.ndim - 1)
        is_last = num_shards > 1 and mesh.get_local_rank(mesh.ndim - 1) == num_shards - 1
        return never_updating(prepared, prepared.named.parameters()) if is_last else prepared


@mutant(after="kozistr/pytorch_optimizer#462", trace=Trace.CRASH)
class KnowsNoStateOfWhatWakes(DistributedDataParallelEngine):
    """A group's first step makes the state of all that has a gradient; what has its first one later fails the step."""

    class Prepared(PreparedDdp):
        def step(self) -> None:
            optimizer = self.built_optimizer()
            for group in optimizer.param_groups:
                with_gradients = [p for p in group["params"] if p.grad is not None]
                lost = [p for p in with_gradients if not optimizer.state.get(p)]
                if lost and any(optimizer.state.get(p) for p in group["params"]):
                    raise KeyError(f"no state of a parameter of shape {list(lost[0].shape)}")
            super().step()
