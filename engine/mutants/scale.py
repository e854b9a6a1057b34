"""Mutants whose gradients are a constant factor off, which Adam hides."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from engine.adapters.torch_fsdp2 import FullyShardEngine
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
        _divide_by(1.0, prepared.module)
        return prepared


class DividesTwice(ReplicateEngine):
    """Gradients are the world size times too small.

    After pytorch/torchtitan#2318: a change of loss normalisation left modes of training that divided by the
    number of ranks where others did not.
    """

    name = "mutant.DividesTwice"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Replicate honestly, then divide by the square of the world size."""
        prepared = super().prepare(model, plan, mesh)
        _divide_by(float(mesh.size() ** 2), prepared.module)
        return prepared


def _divide_by(factor: float, model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A sum, because gloo does not know the scaled sum that a factor of one's own asks for otherwise.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(factor)
