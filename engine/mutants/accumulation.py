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
from engine.mutants.mutant import Condition, Trace, mutant
from engine.plan import Accumulation, Plan

_LAST = Plan(accumulation=Accumulation.LAST_MICROBATCH)


class Forgetful(PreparedModel):
    """Clears all gradients before each backward; to be mixed into an honest engine's prepared model."""

    def backward(self, loss: torch.Tensor) -> None:
        """Forget, then run backward."""
        for parameter in self.named.parameters():
            parameter.grad = None
        super().backward(loss)


class _PreparedForgetful(Forgetful, PreparedDdp):
    pass


@mutant(
    after="NVIDIA/Megatron-LM#7186",
    kills_on=Condition(world_size=1, microbatches=2, because="a single microbatch is the last"),
)
class KeepsOnlyTheLastMicrobatch(DistributedDataParallelEngine):
    """Each backward discards the gradients of the microbatches before it.

    Reported: every backward was treated as the last and cleared the accumulator.
    """

    prepared_type = _PreparedForgetful


class _PreparedDoubling(PreparedDdp):
    def backward(self, loss: torch.Tensor) -> None:
        with torch.no_grad():
            for parameter in self.named.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(2)
        super().backward(loss)


@mutant(
    after="NVIDIA/Megatron-LM#6660",
    kills_on=Condition(
        world_size=1, microbatches=2, because="before the first microbatch nothing is there to double"
    ),
)
class DoublesGradientsEveryMicrobatch(DistributedDataParallelEngine):
    """Each backward doubles what was accumulated before it.

    Reported: the reduced buffer was the accumulated one, and was added to itself.
    """

    prepared_type = _PreparedDoubling


class _PreparedDividing(PreparedDdp):
    def backward(self, loss: torch.Tensor) -> None:
        with torch.no_grad():
            for parameter in self.named.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(dist.get_world_size())
        super().backward(loss)


@mutant(
    after="NVIDIA/Megatron-LM#3023",
    kills_on=Condition(microbatches=2, because="to divide by one changes nothing"),
)
class DividesWhatItAccumulated(DistributedDataParallelEngine):
    """Each backward divides what was accumulated before it by the world size.

    Reported: the shard that had accumulated was scaled once more whenever a new gradient, not scaled itself, was
    about to be added to it.
    """

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


@mutant(
    after="huggingface/accelerate#2790",
    kills_on=Condition(
        world_size=1, microbatches=2, plan=_LAST, because="only who accumulates can step too early"
    ),
)
class StepsAfterEveryMicrobatch(DistributedDataParallelEngine):
    """The optimizer steps after each microbatch.

    Reported: the flag that had each microbatch synchronised decided about the optimizer as well.
    """

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


@mutant(
    after="pytorch/pytorch#90546",
    kills_on=Condition(microbatches=2, plan=_LAST, because="the shard of a lone rank is the whole"),
    trace=Trace.CRASH,
)
class AssignsWholeGradientsToShards(FullyShardEngine):
    """After an accumulation a whole gradient is assigned to a shard.

    Reported: on the way out of an accumulation the gradient was not of the size that the parameter had by then.
    """

    prepared_type = _PreparedAssigning
