"""A mutant of DDP whose communication hook does not wait."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine.adapters.torch_ddp import DistributedDataParallelEngine
from engine.contract import Plan, PreparedModel

__all__ = ["DividesBeforeTheReduction"]


class DividesBeforeTheReduction(DistributedDataParallelEngine):
    """A communication hook divides the bucket by the number of ranks before the reduction that it issued is done.

    After flagos-ai/Torch-FL#62: gradients were read while their reduction was under way on another stream.
    """

    name = "mutant.DividesBeforeTheReduction"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap honestly, then register that hook."""
        prepared = super().prepare(model, plan, mesh)
        ddp: Any = prepared.module  # DDP, which the contract does not know
        # DDP reads annotations, and takes no other than its own.
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
