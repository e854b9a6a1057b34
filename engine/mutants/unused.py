"""Mutants that mistake parameters without a gradient: unused ones, frozen ones, ignored ones."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.contract import Capability, Plan, PreparedModel

__all__ = [
    "GivesZerosToUnusedParameters",
    "IgnoresMoreOnTheLastRank",
    "NeverFreesFrozenUnits",
    "ReducesWhatEachRankUsed",
    "ShardsIgnoredParameters",
    "TrainsFrozenParameters",
]


class _PreparedFilling(PreparedFullyShard):
    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        for parameter in self.named.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


class GivesZerosToUnusedParameters(FullyShardEngine):
    """A parameter that no loss reached is given a gradient of zeros, by which momentum and weight decay move it.

    After facebookresearch/fairscale#605: parameters kept out of a step by a gradient of None moved, since one
    flattened gradient stood for all of them.
    """

    name = "mutant.GivesZerosToUnusedParameters"
    prepared_type = _PreparedFilling


class ReducesWhatEachRankUsed(FullyShardEngine):
    """Each rank reduces the gradients that it happens to have, whatever the others have.

    After pytorch/pytorch#158719: only parameters with a gradient were packed into the reduce-scatter, so ranks
    that took different branches sent buffers of different sizes.
    """

    name = "mutant.ReducesWhatEachRankUsed"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, without the option for ranks that differ."""
        return super().prepare(model, replace(plan, demands=plan.demands - {Capability.RANK_DEPENDENT}), mesh)


class TrainsFrozenParameters(FullyShardEngine):
    """Parameters made anew for sharding require a gradient, whether the original ones did or not.

    After pytorch/torchtitan#4593: sharded anew, frozen parameters became trainable.
    """

    name = "mutant.TrainsFrozenParameters"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Forget what is frozen, then shard honestly."""
        return super().prepare(model.requires_grad_(), plan, mesh)


class NeverFreesFrozenUnits(FullyShardEngine):
    """Once gathered, a unit of frozen parameters alone stays gathered for ever; the numbers are right.

    After pytorch/pytorch#95805: what frees a unit after backward was hung on its gradients, and it had none.
    """

    name = "mutant.NeverFreesFrozenUnits"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then have units without a gradient keep what they gather."""
        prepared = super().prepare(model, plan, mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule) and not any(p.requires_grad for p in module.parameters()):
                module.set_reshard_after_forward(False, recurse=False)
                module.set_reshard_after_backward(False, recurse=False)
        return prepared


class ShardsIgnoredParameters(FullyShardEngine):
    """Parameters that were to be left alone are sharded with the others.

    After Tencent-Hunyuan/UniRL#410: an option asked for was dropped on the way, and training went on.
    """

    name = "mutant.ShardsIgnoredParameters"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, under a plan that ignores nothing."""
        return super().prepare(model, replace(plan, ignored=()), mesh)


class IgnoresMoreOnTheLastRank(FullyShardEngine):
    """The last rank leaves a parameter alone that the others shard.

    After pytorch/pytorch#68803: ranks that were told to ignore different parameters sent messages of different
    sizes in the first broadcast, and waited for each other for ever.
    """

    name = "mutant.IgnoresMoreOnTheLastRank"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly; on the last rank under a plan that ignores the last parameter too."""
        *_, last = (name for name, _ in model.named_parameters())
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1 > 0:
            plan = replace(plan, ignored=(*plan.ignored, last))
        return super().prepare(model, plan, mesh)
