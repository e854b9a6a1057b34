"""Mutants whose cost grows with the number of ranks; with few ranks nothing shows."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine
from shardproof.engine.contract import Grouping, Layout, Plan, PreparedModel
from shardproof.engine.mutants.mutant import Condition, Trace, mutant

_MANY = Condition(
    world_size=1024,
    plan=Plan(layout=Layout.SHARD, grouping=Grouping.REQUIRED),
    because="with few ranks the costs are within what is allowed for alignment and for set-up",
)


def _call_each_rank(mesh: DeviceMesh) -> None:
    group = mesh.get_group()
    for rank in dist.get_process_group_ranks(group):
        dist.broadcast(torch.zeros(1), src=rank, group=group)


@mutant(after="facebookresearch/fairscale#595", kills_on=_MANY, trace=Trace.COMMUNICATION)
class BroadcastsFromEachRank(FullyShardEngine):
    """In preparation each rank broadcasts a number of its own, one after the other."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        _call_each_rank(mesh)
        return super().prepare(model, plan, mesh)


@mutant(
    after="facebookresearch/fairscale#595",
    kills_on=replace(_MANY, plan=Plan(layout=Layout.REPLICATE)),
    trace=Trace.COMMUNICATION,
)
class BroadcastsFromEachReplica(DistributedDataParallelEngine):
    """In preparation each replica broadcasts a number of its own, one after the other."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        _call_each_rank(mesh)
        return super().prepare(model, plan, mesh)


@mutant(after="pytorch/pytorch#82001", kills_on=_MANY, trace=Trace.STATE)
class KeepsANumberForEachRank(FullyShardEngine):
    """Each unit keeps a number for each rank, so that memory stops shrinking as ranks are added."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        for unit in model.modules():
            unit.__dict__["_seen_by_rank"] = torch.zeros(mesh.size())
        return prepared
