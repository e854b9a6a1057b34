"""An engine whose ranks disagree on the size of a collective. Named by path in test_crashes.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine
from shardproof.engine.contract import Plan, PreparedModel


class ReducesTwoSizes(DistributedDataParallelEngine):
    """Reduces 496 bytes on rank 0 and 1024 on the others before it trains, which ends the processes of gloo."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        dist.all_reduce(torch.ones(256 if dist.get_rank() else 124))
        return super().prepare(model, plan, mesh)
