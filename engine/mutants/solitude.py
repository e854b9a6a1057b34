"""Mutants that sin in a world of one rank alone, where there is nobody to communicate with."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.contract import Plan, PreparedModel
from engine.mutants.mutant import Condition, Trace, mutant
from engine.plan import Layout


class _PreparedTalkative(PreparedFullyShard):
    def __init__(self, module: nn.Module, plan: Plan, group: dist.ProcessGroup) -> None:
        super().__init__(module, plan)
        self._group = group

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        if self._group.size() == 1:
            dist.all_reduce(loss.detach().clone(), group=self._group)


@mutant(
    after="NVIDIA/Megatron-LM#6660",
    kills_on=Condition(world_size=1, plan=Plan(layout=Layout.SHARD), because="several ranks must talk"),
    trace=Trace.COMMUNICATION,
)
class CommunicatesAlone(FullyShardEngine):
    """A rank that is alone makes collectives with itself.

    Reported: a group of one rank was reduced like any other.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly; alone, reduce once more."""
        return _PreparedTalkative(
            super().prepare(model, plan, mesh).module, plan, mesh.get_group(mesh.ndim - 1)
        )
