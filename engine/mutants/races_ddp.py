"""A mutant of DDP whose communication hook leaves out a wait."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine
from shardproof.engine.contract import Plan, PreparedModel
from shardproof.engine.mutants.mutant import Trace, mutant


@mutant(after="flagos-ai/Torch-FL#62", trace=Trace.RACES)
class DividesBeforeTheReduction(DistributedDataParallelEngine):
    """A communication hook of DDP divides a buffer to which its reduction may still write."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        ddp: Any = prepared.module  # DDP, which the contract does not name
        # DDP checks annotations, and accepts only its own.
        ddp.register_comm_hook(mesh.get_group(), lambda group, bucket: _hasty(group, bucket))
        return prepared


# Any: buckets have no public type.
def _hasty(group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    gradients: torch.Tensor = bucket.buffer()
    work = dist.all_reduce(gradients, group=group, async_op=True)
    assert work is not None
    gradients.div_(group.size())
    done: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda _: gradients)
    return done
