"""Mutants that lose parts of complex numbers."""

from __future__ import annotations

import torch

from engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp

__all__ = ["DropsImaginaryParts"]


class _PreparedDropping(PreparedDdp):
    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        for parameter in self.named.parameters():
            if parameter.grad is not None and parameter.grad.is_complex():
                parameter.grad.imag.zero_()


class DropsImaginaryParts(DistributedDataParallelEngine):
    """Imaginary parts of gradients are zero; of models of real numbers nothing is lost.

    After pytorch/pytorch#158753: on one process a complex model converged, under DDP its gradients were real.
    """

    name = "mutant.DropsImaginaryParts"
    prepared_type = _PreparedDropping
