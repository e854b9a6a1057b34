"""Mutants that do not say what they cannot do."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from engine.adapters.reference import ReferenceEngine
from engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from engine.contract import Capability, Cut, Plan, PreparedModel, Shard

__all__ = [
    "AcceptsEveryPlan",
    "CallsTheWholeItsChunks",
    "ReducesAsComputedUnasked",
    "RefusesOnOneRank",
    "ReplicatesInsteadOfSharding",
]


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
        ddp = DistributedDataParallel(model, process_group=mesh.get_group())
        return self.prepared_type(ddp, named=model)


class _PreparedClaimant(PreparedDdp):
    cut = Cut.CHUNKS

    def local_parameters(self) -> Mapping[str, Shard]:
        whole = super().local_parameters()
        return {name: Shard.flat(s.tensor.flatten(), 0, s.global_shape) for name, s in whole.items()}


class CallsTheWholeItsChunks(ReplicatesInsteadOfSharding):
    """Declares that it shards in chunks that may be uneven, and every rank holds all of them.

    After Tencent-Hunyuan/UniRL#410: the layout that was asked for was dropped on the way, and training went on.
    """

    name = "mutant.CallsTheWholeItsChunks"
    prepared_type = _PreparedClaimant


class ReducesAsComputedUnasked(ReferenceEngine):
    """Declares that gradients are reduced in the parameters' own dtype, and reduces them in the compute dtype.

    After pytorch/pytorch#194434: FSDP2 had one rule up to torch 2.14 and has the other since.
    """

    name = "mutant.ReducesAsComputedUnasked"
    capabilities = ReferenceEngine.capabilities - {Capability.REDUCE_AS_COMPUTED} | {
        Capability.REDUCE_AS_STORED
    }


class RefusesOnOneRank(DistributedDataParallelEngine):
    """In its first forward rank 0 refuses parameters that cannot be cut; the others go on, and wait for it.

    After huggingface/trl#6862: what one rank raised in forward left its peers waiting in a collective.
    """

    name = "mutant.RefusesOnOneRank"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap, and have rank 0 look at the parameters when it is late."""
        prepared = super().prepare(model, plan, mesh)
        if dist.get_rank() == 0 and any(p.dim() == 0 or p.numel() == 0 for p in model.parameters()):
            prepared.module.register_forward_pre_hook(_refuse)
        return prepared


def _refuse(*_: object) -> None:
    raise ValueError("a parameter that cannot be cut")
