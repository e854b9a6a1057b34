"""Mutants that lose or inflate gradients from one microbatch to the next; one microbatch alone is right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.contract import PreparedModel

__all__ = [
    "AssignsWholeGradientsToShards",
    "DividesWhatItAccumulated",
    "DoublesGradientsEveryMicrobatch",
    "Forgetful",
    "KeepsOnlyTheLastMicrobatch",
    "StepsAfterEveryMicrobatch",
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


class _PreparedDividing(PreparedDdp):
    def backward(self, loss: torch.Tensor) -> None:
        with torch.no_grad():
            for parameter in self.named.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(dist.get_world_size())
        super().backward(loss)


class DividesWhatItAccumulated(DistributedDataParallelEngine):
    """The m-th of M microbatches is divided by the world size M - m times too often.

    After NVIDIA/Megatron-LM#3023: the shard that had accumulated was scaled once more whenever a new gradient,
    not scaled itself, was about to be added to it.
    """

    name = "mutant.DividesWhatItAccumulated"
    prepared_type = _PreparedDividing


class _PreparedStepping(PreparedDdp):
    _is_accumulating = False

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        self._is_accumulating = True
        try:
            yield
        finally:
            self._is_accumulating = False

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        if self._is_accumulating:
            self.step()


class StepsAfterEveryMicrobatch(DistributedDataParallelEngine):
    """The optimizer steps after each microbatch, with what has accumulated by then.

    After huggingface/accelerate#2790: the flag that had each microbatch synchronised decided about the optimizer
    as well.
    """

    name = "mutant.StepsAfterEveryMicrobatch"
    prepared_type = _PreparedStepping


class _PreparedAssigning(PreparedFullyShard):
    _has_accumulated = False

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        with super().accumulating():
            yield
        self._has_accumulated = True

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        if not self._has_accumulated:
            return
        for parameter in self.owned_parameters().values():
            if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
                shard = nn.Parameter(parameter.to_local().detach())
                shard.grad = parameter.grad.full_tensor()


class AssignsWholeGradientsToShards(FullyShardEngine):
    """What accumulated without synchronisation is whole, and is to be the gradient of a shard: torch refuses it.

    After pytorch/pytorch#90546: on the way out of an accumulation the gradient was not of the size that the
    parameter had by then.
    """

    name = "mutant.AssignsWholeGradientsToShards"
    prepared_type = _PreparedAssigning
