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
from engine.mutants.mutant import Condition, Trace, mutant
from engine.plan import Accumulation

_LAST_MICROBATCH = Plan(accumulation=Accumulation.LAST_MICROBATCH)


@mutant(after="pytorch/pytorch#109774", kills_on=Condition(because="one rank has nobody to synchronise with"))
class NeverSynchronises(DistributedDataParallelEngine):
    """Gradients stay on the rank that computed them.

    Reported: compiled around the wrapper, DDP's hooks were gone after the first forward.
    """

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


@mutant(
    after="NVIDIA/cosmos-framework#161",
    kills_on=Condition(
        steps=2,
        microbatches=2,
        plan=_LAST_MICROBATCH,
        because="the only microbatch is also the last; counts hold from the second step on",
    ),
    trace=Trace.COMMUNICATION,
)
class SynchronisesEveryMicrobatch(FullyShardEngine):
    """Gradients are reduced after each microbatch although accumulation was asked.

    Reported: the gate that holds synchronisation back knew DDP and nothing else.
    """

    prepared_type = PreparedWithoutAccumulation


class _PreparedDrifting(PreparedDdp):
    def step(self) -> None:
        super().step()
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1 > 0:
            first = next(self.named.parameters()).detach().view(-1)
            first[0] = torch.nextafter(first[0], torch.tensor(torch.inf))


@mutant(
    after="deepspeedai/DeepSpeed#1801", kills_on=Condition(because="one rank has no replica to part from")
)
class DriftsByOneBit(DistributedDataParallelEngine):
    """One weight of one replica is off by a bit after each step.

    Reported: replicated weights drifted apart over ranks for ten days, unseen.
    """

    prepared_type = _PreparedDrifting
