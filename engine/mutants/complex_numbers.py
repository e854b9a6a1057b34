"""Mutants that lose parts of complex numbers."""

from __future__ import annotations

import torch

from engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from engine.capability import Capability
from engine.mutants.mutant import Condition, mutant
from engine.plan import Plan


class _PreparedDropping(PreparedDdp):
    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        for parameter in self.named.parameters():
            if parameter.grad is not None and parameter.grad.is_complex():
                parameter.grad.imag.zero_()


@mutant(
    after="pytorch/pytorch#158753",
    kills_on=Condition(
        world_size=1,
        plan=Plan(demands=frozenset({Capability.COMPLEX})),
        because="models of real numbers have none",
    ),
)
class DropsImaginaryParts(DistributedDataParallelEngine):
    """Imaginary parts of gradients are zero.

    Reported: on one process a complex model converged, under DDP its gradients were real.
    """

    prepared_type = _PreparedDropping
