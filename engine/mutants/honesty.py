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
    "ShowsSlicesOfWholes",
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


class _PreparedSlices(PreparedDdp):
    """Shows this rank's rows of everything that it holds whole."""

    def local_parameters(self) -> Mapping[str, Shard]:
        return {name: _rows(shard) for name, shard in super().local_parameters().items()}

    def local_gradients(self) -> Mapping[str, Shard | None]:
        return {name: shard and _rows(shard) for name, shard in super().local_gradients().items()}

    def local_optimizer_state(self) -> Mapping[str, Shard]:
        return {name: _rows(shard) for name, shard in super().local_optimizer_state().items()}


class ShowsSlicesOfWholes(ReplicatesInsteadOfSharding):
    """Declares that it shards, replicates parameters, gradients and state, and shows slices of them.

    After facebookresearch/fairscale#1050: sharded training took as much memory as replicated training.
    """

    name = "mutant.ShowsSlicesOfWholes"
    prepared_type = _PreparedSlices


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


def _rows(whole: Shard) -> Shard:
    if not whole.global_shape:
        return whole
    num_rows, rank = whole.global_shape[0], dist.get_rank()
    chunk = -(-num_rows // dist.get_world_size())
    start, end = min(num_rows, rank * chunk), min(num_rows, (rank + 1) * chunk)
    offsets = (start, *whole.offsets[1:])
    return Shard(tensor=whole.tensor[start:end], offsets=offsets, global_shape=whole.global_shape)


def _refuse(*_: object) -> None:
    raise ValueError("a parameter that cannot be cut")
