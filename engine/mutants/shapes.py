"""Mutants that mistake parameters too small to cut."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from engine.adapters.torch_ddp import DistributedDataParallelEngine
from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.contract import Plan, PreparedModel
from engine.mutants.mutant import Condition, mutant


class _PreparedShortSighted(PreparedFullyShard):
    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        for parameter in self.named.parameters():
            if isinstance(parameter.grad, DTensor) and parameter.grad.numel() == 1:
                parameter.grad.to_local().zero_()


@mutant(
    after="pytorch/pytorch#144045", kills_on=Condition(world_size=1, because="larger parameters are right")
)
class GivesSmallParametersNoGradient(FullyShardEngine):
    """The gradient of a parameter of one element is zero.

    Reported: a small parameter stayed where it was, its gradient always zero.
    """

    prepared_type = _PreparedShortSighted


@mutant(
    after="deepspeedai/DeepSpeed#202", kills_on=Condition(because="a lone rank has nobody to reduce with")
)
class ForgetsScalars(DistributedDataParallelEngine):
    """Parameters of no dim are left out of every reduction.

    Reported: parameters whose number of elements the ranks did not divide were lost.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Leave them out, then wrap honestly."""
        _leave_out(model, [name for name, p in model.named_parameters() if not p.dim()])
        return super().prepare(model, plan, mesh)


@mutant(
    after="deepspeedai/DeepSpeed#8279", kills_on=Condition(because="a lone rank has nobody to reduce with")
)
class MistakesTheNeighbourOfAnEmptyParameter(DistributedDataParallelEngine):
    """The parameter after an empty one is left out of every reduction.

    Reported: where parameters lie was found by their elements, and of an empty one there are none.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Leave it out, then wrap honestly."""
        neighbours = pairwise(model.named_parameters())
        _leave_out(model, [name for (_, before), (name, _) in neighbours if not before.numel()])
        return super().prepare(model, plan, mesh)


def _leave_out(model: nn.Module, names: list[str]) -> None:
    # DDP's documented way to leave a parameter out; it has neither a public name nor types.
    leave_out = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    leave_out(model, names)  # type: ignore[no-untyped-call]
