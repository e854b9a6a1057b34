"""Mutants that synchronise gradients never, not everywhere, or too often."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.contract import Layout, Plan, PreparedModel

__all__ = [
    "DriftsByOneBit",
    "NeverSynchronises",
    "NeverSynchronisesReplicas",
    "ReducesReplicasEveryMicrobatch",
    "SynchronisesEveryMicrobatch",
]


class NeverSynchronises(DistributedDataParallelEngine):
    """Each rank trains on its own data alone.

    After pytorch/pytorch#109774: compiled around the wrapper, DDP's hooks were gone after the first forward.
    """

    name = "mutant.NeverSynchronises"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap honestly, then stay for ever in the state that no_sync sets for a while."""
        prepared = super().prepare(model, plan, mesh)
        assert isinstance(prepared.module, DistributedDataParallel)
        prepared.module.require_backward_grad_sync = False
        return prepared


class NeverSynchronisesReplicas(FullyShardEngine):
    """Under a hybrid layout each replica trains on its own data alone; other layouts are honest.

    After pytorch/pytorch#154888: hybrid sharding on an (n, 1) mesh reduced over the shard axis only.
    """

    name = "mutant.NeverSynchronisesReplicas"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard on the shard axis as if there were no other."""
        return super().prepare(model, plan, mesh["shard"] if plan.layout is Layout.HYBRID else mesh)


class _PreparedWithoutAccumulation(PreparedFullyShard):
    @contextmanager
    def accumulating(self) -> Iterator[None]:
        yield


class SynchronisesEveryMicrobatch(FullyShardEngine):
    """Accumulation saves no communication; the numbers are right.

    After NVIDIA/cosmos-framework#161: the gate that holds synchronisation back knew DDP and nothing else.
    """

    name = "mutant.SynchronisesEveryMicrobatch"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly; the way to accumulate does nothing."""
        return _PreparedWithoutAccumulation(super().prepare(model, plan, mesh).module)


class ReducesReplicasEveryMicrobatch(FullyShardEngine):
    """As SynchronisesEveryMicrobatch, but under a hybrid layout alone, where it costs the most.

    After NVIDIA/cosmos-framework#161: with hybrid sharding every microbatch paid for the whole reduction.
    """

    name = "mutant.ReducesReplicasEveryMicrobatch"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly; under a hybrid layout the way to accumulate does nothing."""
        prepared = super().prepare(model, plan, mesh)
        is_hybrid = plan.layout is Layout.HYBRID
        return _PreparedWithoutAccumulation(prepared.module) if is_hybrid else prepared


class _PreparedDrifting(PreparedDdp):
    def step(self) -> None:
        super().step()
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1 > 0:
            first = next(self.named.parameters()).detach().view(-1)
            first[0] = torch.nextafter(first[0], torch.tensor(torch.inf))


class DriftsByOneBit(DistributedDataParallelEngine):
    """After each step the last rank's first weight is off by one bit: within noise, but replicas part.

    After deepspeedai/DeepSpeed#1801: replicated weights drifted apart over ranks for ten days, unseen.
    """

    name = "mutant.DriftsByOneBit"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap honestly; the step adds the bit."""
        prepared = super().prepare(model, plan, mesh)
        return _PreparedDrifting(prepared.module, named=prepared.named)
