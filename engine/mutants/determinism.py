"""Mutants that do not do the same twice."""

from __future__ import annotations

import threading

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.contract import Plan, PreparedModel
from engine.mutants.mutant import Condition, mutant

# Of the thread: where ranks are threads, each has its own count, as if it were a process.
_PREPARED = threading.local()


class _PreparedUnstable(PreparedFullyShard):
    """In every second run the largest gradient comes out one bit off, as it would from another order of summation."""

    def __init__(self, module: nn.Module, plan: Plan, *, is_second: bool) -> None:
        super().__init__(module, plan)
        self._is_second = is_second

    @torch.no_grad()
    def backward(self, loss: torch.Tensor) -> None:
        with torch.enable_grad():
            super().backward(loss)
        for parameter in self.named.parameters():
            if self._is_second and isinstance(parameter.grad, DTensor) and parameter.grad.to_local().numel():
                flat = parameter.grad.to_local().view(-1)
                largest = flat.abs().argmax()
                flat[largest] = torch.nextafter(flat[largest], torch.zeros(()))


@mutant(
    after="horovod/horovod#1548", kills_on=Condition(world_size=1, because="a single run is within rounding")
)
class SumsInAnotherOrderEachTime(FullyShardEngine):
    """Every second run differs by a bit.

    Reported: which tensors were fused differed from run to run, and with it the order in which their elements were
    added.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly; remember whether this is done for the second time."""
        count = getattr(_PREPARED, "count", 0)
        _PREPARED.count = count + 1
        module = super().prepare(model, plan, mesh).module
        return _PreparedUnstable(module, plan, is_second=count % 2 == 1)
