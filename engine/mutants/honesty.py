"""Mutants that do not say what they cannot do."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from engine.contract import Plan, PreparedModel

__all__ = ["AcceptsEveryPlan"]


class AcceptsEveryPlan(DistributedDataParallelEngine):
    """Whatever layout, grouping or dtype is asked for, it replicates, and says nothing.

    After Tencent-Hunyuan/UniRL#410: a hybrid layout was asked for and silently became another one.
    """

    name = "mutant.AcceptsEveryPlan"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap over all ranks without a look at what the plan needs."""
        return PreparedDdp(DistributedDataParallel(model), named=model)
