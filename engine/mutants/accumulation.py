"""Mutants that lose or inflate gradients from one microbatch to the next; one microbatch alone is right."""

from __future__ import annotations

import torch

from engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from engine.contract import PreparedModel

__all__ = [
    "DoublesGradientsEveryMicrobatch",
    "Forgetful",
    "KeepsOnlyTheLastMicrobatch",
]


class Forgetful(PreparedModel):
    """Clears all gradients before each backward; to be mixed into an honest engine's prepared model."""

    def backward(self, loss: torch.Tensor) -> None:
        """Forget, then run backward."""
        for parameter in self.named.parameters():
            parameter.grad = None
        super().backward(loss)


class _PreparedForgetful(Forgetful, PreparedDdp):
    pass


class KeepsOnlyTheLastMicrobatch(DistributedDataParallelEngine):
    """Only the last microbatch reaches the optimizer.

    After NVIDIA/Megatron-LM#7186: every backward was treated as the last and cleared the accumulator.
    """

    name = "mutant.KeepsOnlyTheLastMicrobatch"
    prepared_type = _PreparedForgetful


class _PreparedDoubling(PreparedDdp):
    def backward(self, loss: torch.Tensor) -> None:
        with torch.no_grad():
            for parameter in self.named.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(2)
        super().backward(loss)


class DoublesGradientsEveryMicrobatch(DistributedDataParallelEngine):
    """The m-th of M microbatches weighs 2 ** (M - m) times what it should.

    After NVIDIA/Megatron-LM#6660: the reduced buffer was the accumulated one, and was added to itself.
    """

    name = "mutant.DoublesGradientsEveryMicrobatch"
    prepared_type = _PreparedDoubling
