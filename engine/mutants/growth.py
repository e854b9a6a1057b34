"""Mutants that show only with many ranks, many steps, large tensors or faint gradients.

And those whose reads are right while the module of the caller, or another rank, is not.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from shardproof.engine.adapters.reference import ReferenceEngine
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine
from shardproof.engine.contract import Plan, PreparedModel, Shard
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import is_last_rank


@mutant(after="facebookresearch/fairscale#595", trace=Trace.COMMUNICATION)
class BroadcastsFromEachRank(ReferenceEngine):
    """In preparation each rank broadcasts a number of its own, one after the other."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        group = mesh.get_group()
        for rank in dist.get_process_group_ranks(group):
            dist.broadcast(torch.zeros(1), src=rank, group=group)
        return super().prepare(model, plan, mesh)


@mutant(after="pytorch/pytorch#82001", trace=Trace.STATE)
class KeepsANumberForEachRank(FullyShardEngine):
    """Each unit keeps a number for each rank, so that memory stops shrinking as ranks are added."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        for unit in model.modules():
            unit.__dict__["_seen_by_rank"] = torch.zeros(mesh.size())
        return prepared


_WARM_UP_STEPS = 12


@mutant(after="pytorch/pytorch#59699", phase="reduce")
class StopsSynchronisingAfterWarmUp(DistributedDataParallelEngine):
    """From the thirteenth step on gradients stay on the rank that computed them, as in post-local SGD."""

    class Prepared(PreparedDdp):
        num_steps = 0

        def step(self) -> None:
            super().step()
            self.num_steps += 1
            self.module.require_backward_grad_sync = self.num_steps < _WARM_UP_STEPS  # type: ignore[assignment]  # DDP's


@mutant(after="tracel-ai/burn#5779", phase="step")
class FreezesTheLearningRate(DistributedDataParallelEngine):
    """The learning rate of the second step is used in all later ones, as by a graph that captured it."""

    class Prepared(PreparedDdp):
        num_steps = 0
        captured: tuple[Any, ...] = ()

        def step(self) -> None:
            groups = self.built_optimizer().param_groups
            if self.num_steps < 2:
                self.captured = tuple(group["lr"] for group in groups)
            for group, rate in zip(groups, self.captured, strict=True):
                group["lr"] = rate
            super().step()
            self.num_steps += 1


@mutant(after="deepspeedai/DeepSpeed#3832", phase="reduce")
class ReducesTheFirstMillionElements(DistributedDataParallelEngine):
    """Of a gradient with more than 2^20 elements only the first 2^20 are reduced."""

    def sent(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the part of a flattened gradient that is reduced, as a view into it."""
        return gradient[: 2**20]

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        assert isinstance(prepared.module, DistributedDataParallel)
        group = mesh.get_group()

        # Any: buckets have no public type.
        def reduce(bucket: Any) -> torch.futures.Future[torch.Tensor]:
            for gradient in bucket.gradients():
                part = self.sent(gradient.flatten())
                dist.all_reduce(part, group=group)
                part.div_(group.size())
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        prepared.module.register_comm_hook(None, lambda _, bucket: reduce(bucket))
        return prepared


@mutant(after="apache/mxnet#17952", phase="reduce")
class DropsFaintGradients(ReducesTheFirstMillionElements):
    """Elements below a millionth of the largest are set to zero before the reduction."""

    def sent(self, gradient: torch.Tensor) -> torch.Tensor:
        gradient[gradient.abs() < 1e-6 * gradient.abs().max()] = 0.0
        return gradient


@mutant(after="NVIDIA/Megatron-LM#5236", trace=Trace.STATE)
class LeavesTheModuleAStepBehind(DistributedDataParallelEngine):
    """The caller's module gets each update one step late; what is shown comes from copies that are up to date."""

    class Prepared(PreparedDdp):
        def __init__(self, module: nn.Module, *, named: nn.Module) -> None:
            super().__init__(module, named=named)
            self.behind: list[nn.Parameter] = []

        def step(self) -> None:
            latest = [p.detach().clone() for p in self.named.parameters()]
            super().step()
            for behind, before in zip(self.behind, latest, strict=True):
                behind.data.copy_(before)

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(copy.deepcopy(model), plan, mesh)
        assert isinstance(prepared, LeavesTheModuleAStepBehind.Prepared)
        prepared.behind = list(model.parameters())
        return prepared


@mutant(after="facebookresearch/fairscale#1050", trace=Trace.STATE)
class ShowsNoGradientsOnTheLastRank(DistributedDataParallelEngine):
    """The last rank shows an empty share of each gradient that it has whole."""

    class Prepared(PreparedDdp):
        def local_gradients(self) -> Mapping[str, Shard | None]:
            shards = super().local_gradients()
            return (
                {name: shard and _empty(shard) for name, shard in shards.items()}
                if is_last_rank()
                else shards
            )


def _empty(shard: Shard) -> Shard:
    return Shard.flat(shard.tensor.flatten()[:0], 0, shard.global_shape)
