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
from engine.contract import Plan, PreparedModel

__all__ = [
    "DriftsByOneBit",
    "NeverSynchronises",
    "PreparedWithoutAccumulation",
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


class PreparedWithoutAccumulation(PreparedFullyShard):
    """Offers a way to accumulate that does nothing."""

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Hold nothing back."""
        yield


class SynchronisesEveryMicrobatch(FullyShardEngine):
    """Accumulation saves no communication; the numbers are right.

    After NVIDIA/cosmos-framework#161: the gate that holds synchronisation back knew DDP and nothing else.
    """

    name = "mutant.SynchronisesEveryMicrobatch"
    prepared_type = PreparedWithoutAccumulation


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
    prepared_type = _PreparedDrifting
