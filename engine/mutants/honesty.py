"""Mutants that do not say what they cannot do."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from engine.contract import Capability, Plan, PreparedModel

__all__ = ["AcceptsEveryPlan", "ReplicatesInsteadOfSharding"]


class AcceptsEveryPlan(DistributedDataParallelEngine):
    """Whatever layout, grouping or dtype is asked for, it replicates, and says nothing.

    After Tencent-Hunyuan/UniRL#410: a hybrid layout was asked for and silently became another one.
    """

    name = "mutant.AcceptsEveryPlan"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap over all ranks without a look at what the plan needs."""
        return PreparedDdp(DistributedDataParallel(model), named=model)


class ReplicatesInsteadOfSharding(DistributedDataParallelEngine):
    """Declares that it shards, and replicates: the numbers are right, the memory saved is none.

    After Tencent-Hunyuan/UniRL#410: the layout that was asked for was dropped on the way, and training went on.
    """

    name = "mutant.ReplicatesInsteadOfSharding"
    capabilities = frozenset({Capability.SHARD, Capability.ACCUMULATE})

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Refuse honestly what is not declared; replicate the rest."""
        plan.refuse_beyond(self.capabilities)
        return PreparedDdp(DistributedDataParallel(model, process_group=mesh.get_group()), named=model)
