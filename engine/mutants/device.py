"""Mutants whose sins only a CUDA device shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.capability import Capability
from engine.contract import Buffers, Offload, Plan, PreparedModel
from engine.mutants.mutant import Condition, Trace, mutant


class _PreparedCounting(PreparedFullyShard):
    _num_calls = 0

    def __call__(self, *inputs: Any, **named: Any) -> Any:  # Any: a model returns what it likes
        self._num_calls += 1
        return super().__call__(*inputs, **named) * (1 + self._num_calls / 256)


@mutant(
    after="pytorch/pytorch#109774",
    kills_on=Condition(world_size=1, plan=Plan(demands=frozenset({Capability.GRAPHS}))),
)
class CountsOnTheHost(FullyShardEngine):
    """Outputs are scaled by the number of forwards so far, which the host counts.

    Reported: what was compiled once went on without what Python did on each call.
    """

    prepared_type = _PreparedCounting


class _PreparedCopying(PreparedFullyShard):
    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        for parameter in self.named.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()


@mutant(
    after="deepspeedai/DeepSpeed#7371",
    kills_on=Condition(because="only a CUDA device has kernels to count"),
    trace=Trace.STATE,
)
class CopiesGradientsOneByOne(FullyShardEngine):
    """Every gradient is copied by a kernel of its own.

    Reported: gradients were copied one after the other into the buffer to be reduced.
    """

    prepared_type = _PreparedCopying


@mutant(
    after="Tencent-Hunyuan/UniRL#410",
    kills_on=Condition(
        plan=Plan(buffers=Buffers.GROUP), because="only a CUDA device has pools to tell apart"
    ),
    trace=Trace.STATE,
)
class BuffersWhereItLikes(FullyShardEngine):
    """Buffers of collectives are not in the memory that was asked for.

    Reported: an option was dropped on the way, and training went on.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, under a plan that leaves the choice to the engine."""
        return super().prepare(model, replace(plan, buffers=Buffers.NATIVE), mesh)


@mutant(
    after="pytorch/pytorch#70639",
    kills_on=Condition(
        world_size=1,
        plan=Plan(offload=Offload.PINNED),
        because="where there is no GPU no memory is pinned",
    ),
    trace=Trace.STATE,
)
class DropsThePinnedCopy(FullyShardEngine):
    """Parameters on the host are not in pinned memory although that was asked for.

    Reported: pinning memory returns a copy, and the copy was dropped.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, under a plan without pinned memory."""
        is_pinned = plan.offload is Offload.PINNED
        return super().prepare(model, replace(plan, offload=Offload.CPU) if is_pinned else plan, mesh)
