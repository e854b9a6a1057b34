"""Mutants whose sins only a CUDA device shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.contract import Buffers, Offload, Plan, PreparedModel

__all__ = ["BuffersWhereItLikes", "CopiesGradientsOneByOne", "CountsOnTheHost", "DropsThePinnedCopy"]


class _PreparedCounting(PreparedFullyShard):
    _num_calls = 0

    def __call__(self, *inputs: torch.Tensor) -> Any:  # Any: a model returns what it likes
        self._num_calls += 1
        return super().__call__(*inputs) * (1 + self._num_calls / 256)


class CountsOnTheHost(FullyShardEngine):
    """What a forward gives depends on a count that the host keeps, which a captured graph never sees again.

    After pytorch/pytorch#109774: what was compiled once went on without what Python did on each call.
    """

    name = "mutant.CountsOnTheHost"
    prepared_type = _PreparedCounting


class _PreparedCopying(PreparedFullyShard):
    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        for parameter in self.named.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()


class CopiesGradientsOneByOne(FullyShardEngine):
    """Every gradient is copied by a kernel of its own; the numbers are right.

    After deepspeedai/DeepSpeed#7371: gradients were copied one after the other into the buffer to be reduced.
    """

    name = "mutant.CopiesGradientsOneByOne"
    prepared_type = _PreparedCopying


class BuffersWhereItLikes(FullyShardEngine):
    """Buffers of collectives come from the common pool, wherever they were asked for; the numbers are right.

    After Tencent-Hunyuan/UniRL#410: an option was dropped on the way, and training went on.
    """

    name = "mutant.BuffersWhereItLikes"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, under a plan that leaves the choice to the engine."""
        return super().prepare(model, replace(plan, buffers=Buffers.NATIVE), mesh)


class DropsThePinnedCopy(FullyShardEngine):
    """Parameters on the host are in pageable memory although pinned memory was asked for; the numbers are right.

    After pytorch/pytorch#70639: pinning memory returns a copy, and the copy was dropped.
    """

    name = "mutant.DropsThePinnedCopy"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, under a plan without pinned memory."""
        is_pinned = plan.offload is Offload.PINNED
        return super().prepare(model, replace(plan, offload=Offload.CPU) if is_pinned else plan, mesh)
