"""Mutants that mistake parameters without a gradient: unused ones, frozen ones, ignored ones."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.contract import Capability, Plan, PreparedModel
from engine.mutants.mutant import Condition, Trace, mutant
from engine.plan import Layout

_UNUSED = Plan(demands=frozenset({Capability.UNUSED}))
_BORROWED = Plan(demands=frozenset({Capability.UNUSED, Capability.RANK_DEPENDENT}))


class _PreparedFilling(PreparedFullyShard):
    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        for parameter in self.named.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


@mutant(
    after="facebookresearch/fairscale#605",
    kills_on=Condition(
        world_size=1, plan=_UNUSED, because="where all parameters are used none is without a gradient"
    ),
)
class GivesZerosToUnusedParameters(FullyShardEngine):
    """Parameters that no loss reached get a gradient of zeros.

    Reported: parameters kept out of a step by a gradient of None moved, since one flattened gradient stood for all
    of them.
    """

    prepared_type = _PreparedFilling


@mutant(
    after="pytorch/pytorch#158719",
    kills_on=Condition(plan=_BORROWED, because="ranks that use the same parameters have the same gradients"),
    trace=Trace.COMMUNICATION,
)
class ReducesWhatEachRankUsed(FullyShardEngine):
    """Each rank reduces the gradients that it has, whatever the others have.

    Reported: only parameters with a gradient were packed into the reduce-scatter, so ranks that took different
    branches sent buffers of different sizes.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, without the option for ranks that differ."""
        return super().prepare(model, replace(plan, demands=plan.demands - {Capability.RANK_DEPENDENT}), mesh)


@mutant(
    after="pytorch/torchtitan#4593",
    kills_on=Condition(
        world_size=1, because="in a model without frozen parameters there is nothing to forget"
    ),
)
class TrainsFrozenParameters(FullyShardEngine):
    """Frozen parameters are trained.

    Reported: sharded anew, frozen parameters became trainable.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Forget what is frozen, then shard honestly."""
        return super().prepare(model.requires_grad_(), plan, mesh)


@mutant(
    after="pytorch/pytorch#95805",
    kills_on=Condition(
        steps=2,
        plan=Plan(layout=Layout.SHARD),
        because="what is kept is missed when it is not gathered again",
    ),
    trace=Trace.COMMUNICATION,
)
class NeverFreesFrozenUnits(FullyShardEngine):
    """Units of frozen parameters stay gathered for ever.

    Reported: what frees a unit after backward was hung on its gradients, and it had none.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then have units without a gradient keep what they gather."""
        prepared = super().prepare(model, plan, mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule) and not any(p.requires_grad for p in module.parameters()):
                module.set_reshard_after_forward(False, recurse=False)
                module.set_reshard_after_backward(False, recurse=False)
        return prepared


@mutant(
    after="Tencent-Hunyuan/UniRL#410",
    kills_on=Condition(
        plan=Plan(layout=Layout.SHARD, ignored=("head.bias",)), because="one rank's share is the whole"
    ),
    trace=Trace.STATE,
)
class ShardsIgnoredParameters(FullyShardEngine):
    """Parameters that were to be ignored are sharded.

    Reported: an option asked for was dropped on the way, and training went on.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, under a plan that ignores nothing."""
        return super().prepare(model, replace(plan, ignored=()), mesh)


@mutant(
    after="pytorch/pytorch#68803",
    kills_on=Condition(because="a lone rank agrees with itself"),
    trace=Trace.COMMUNICATION,
)
class IgnoresMoreOnTheLastRank(FullyShardEngine):
    """The last rank leaves a parameter alone that the others shard.

    Reported: ranks that were told to ignore different parameters sent messages of different sizes in the first
    broadcast, and waited for each other for ever.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly; on the last rank under a plan that ignores the last parameter too."""
        *_, last = (name for name, _ in model.named_parameters())
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1 > 0:
            plan = replace(plan, ignored=(*plan.ignored, last))
        return super().prepare(model, plan, mesh)
