"""A mutant of DDP whose communication hook does not wait."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine.adapters.torch_ddp import DistributedDataParallelEngine
from engine.capability import Capability
from engine.contract import Plan, PreparedModel
from engine.mutants.mutant import Condition, Trace, mutant
from engine.plan import Layout

_BY_HAND = frozenset({Capability.UNIT_STATE, Capability.ASYNC_GATHER})


@mutant(
    after="flagos-ai/Torch-FL#62", kills_on=Condition(plan=Plan(layout=Layout.REPLICATE)), trace=Trace.RACES
)
class DividesBeforeTheReduction(DistributedDataParallelEngine):
    """A communication hook of DDP divides what its reduction may still be writing.

    Reported: gradients were read while their reduction was under way on another stream.
    """

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
