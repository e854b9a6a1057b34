"""Mutants with right numbers and communication that nobody needs."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FSDPModule

from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.mutants.mutant import Condition, Trace, mutant


class _PreparedWasteful(PreparedFullyShard):
    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        # The last unit in the order of modules: the root may have no parameters of its own left to gather.
        *_, unit = (m for m in self.module.modules() if isinstance(m, FSDPModule))
        unit.unshard()
        unit.reshard()


@mutant(
    after="pytorch/pytorch#76553",
    kills_on=Condition(steps=2, because="one rank gathers nothing; counts hold from the second step on"),
    trace=Trace.COMMUNICATION,
)
class GathersOnceMoreInBackward(FullyShardEngine):
    """Backward gathers one unit's parameters once more than it needs them.

    Reported: backward issued more all-gathers than there were modules.
    """

    prepared_type = _PreparedWasteful
