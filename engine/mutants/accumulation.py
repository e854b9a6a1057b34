"""Mutants that lose or inflate gradients from one microbatch to the next; one microbatch alone is right."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.contract import Layout, Plan, PreparedModel

__all__ = [
    "DoublesGradientsEveryMicrobatch",
    "KeepsOnlyTheLastMicrobatch",
    "LosesMicrobatchesOfReplicas",
]


class _PreparedForgetful(PreparedDdp):
    def backward(self, loss: torch.Tensor) -> None:
        for parameter in self.named.parameters():
            parameter.grad = None
        super().backward(loss)


class KeepsOnlyTheLastMicrobatch(DistributedDataParallelEngine):
    """Only the last microbatch reaches the optimizer.

    After NVIDIA/Megatron-LM#7186: every backward was treated as the last and cleared the accumulator.
    """

    name = "mutant.KeepsOnlyTheLastMicrobatch"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap honestly, then forget before each backward."""
        return _PreparedForgetful(super().prepare(model, plan, mesh).module, named=model)


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

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap honestly, then double before each backward."""
        return _PreparedDoubling(super().prepare(model, plan, mesh).module, named=model)


class _PreparedForgetfulReplicas(PreparedFullyShard):
    def backward(self, loss: torch.Tensor) -> None:
        for parameter in self.named.parameters():
            parameter.grad = None
        super().backward(loss)


class LosesMicrobatchesOfReplicas(FullyShardEngine):
    """Under a hybrid layout only the last microbatch reaches the optimizer; other layouts are honest.

    After NVIDIA/Megatron-LM#7186: an adapter of a two-dimensional mesh had inherited a way to accumulate that
    did nothing.
    """

    name = "mutant.LosesMicrobatchesOfReplicas"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly; under a hybrid layout each backward clears what was there."""
        prepared = super().prepare(model, plan, mesh)
        is_hybrid = plan.layout is Layout.HYBRID
        return _PreparedForgetfulReplicas(prepared.module) if is_hybrid else prepared
