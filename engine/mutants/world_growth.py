"""Mutants whose cost grows with the number of ranks; with few ranks nothing shows."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine
from shardproof.engine.contract import Plan, PreparedModel
from shardproof.engine.mutants.mutant import Trace, mutant


def _call_each_rank(mesh: DeviceMesh) -> None:
    group = mesh.get_group()
    for rank in dist.get_process_group_ranks(group):
        dist.broadcast(torch.zeros(1), src=rank, group=group)


@mutant(after="facebookresearch/fairscale#595", trace=Trace.COMMUNICATION)
class BroadcastsFromEachRank(FullyShardEngine):
    """In preparation each rank broadcasts a number of its own, one after the other."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        _call_each_rank(mesh)
        return super().prepare(model, plan, mesh)


@mutant(after="facebookresearch/fairscale#595", trace=Trace.COMMUNICATION)
class BroadcastsFromEachReplica(DistributedDataParallelEngine):
    """In preparation each replica broadcasts a number of its own, one after the other."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        _call_each_rank(mesh)
        return super().prepare(model, plan, mesh)


@mutant(after="pytorch/pytorch#82001", trace=Trace.STATE)
class KeepsANumberForEachRank(FullyShardEngine):
    """Each unit keeps a number for each rank, so that memory stops shrinking as ranks are added."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        for unit in model.modules():
            unit.__dict__["_seen_by_rank"] = torch.zeros(mesh.size())
        return prepared
