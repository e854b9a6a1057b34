"""Mutants whose gradients are a constant factor off, which Adam hides."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.adapters.torch_replicate import ReplicateEngine
from engine.contract import Plan, PreparedModel

__all__ = ["DividesTwice", "SumsInsteadOfAveraging"]


class SumsInsteadOfAveraging(FullyShardEngine):
    """Gradients are the world size times too large.

    After NVIDIA/Megatron-LM#3023: without accumulation nothing scaled the gradients by 1 / ranks.
    """

    name = "mutant.SumsInsteadOfAveraging"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then divide by one."""
        prepared = super().prepare(model, plan, mesh)
        for module in prepared.module.modules():
            if isinstance(module, FSDPModule):
                # Plain sums, because gloo does not know the scaled sum that a divisor asks for otherwise.
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
        return prepared


class _PreparedTimid(PreparedFullyShard):
    def __init__(self, module: nn.Module, *, world_size: int) -> None:
        super().__init__(module)
        self._world_size = world_size

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss / self._world_size)


class DividesTwice(ReplicateEngine):
    """Gradients are the world size times too small.

    After pytorch/torchtitan#2318: a change of loss normalisation left modes of training that divided by the
    number of ranks where others did not.
    """

    name = "mutant.DividesTwice"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Replicate honestly, and divide the loss although the reduction divides too."""
        return _PreparedTimid(super().prepare(model, plan, mesh).module, world_size=mesh.size())
