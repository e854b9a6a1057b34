"""Mutants with right numbers and communication that nobody needs."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FSDPModule

from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard

__all__ = ["GathersOnceMoreInBackward"]


class _PreparedWasteful(PreparedFullyShard):
    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        # The last unit in the order of modules: the root may have no parameters of its own left to gather.
        *_, unit = (m for m in self.module.modules() if isinstance(m, FSDPModule))
        unit.unshard()
        unit.reshard()


class GathersOnceMoreInBackward(FullyShardEngine):
    """One unit is gathered again when its backward is over, and freed unused.

    After pytorch/pytorch#76553: backward issued more all-gathers than there were modules.
    """

    name = "mutant.GathersOnceMoreInBackward"
    prepared_type = _PreparedWasteful
