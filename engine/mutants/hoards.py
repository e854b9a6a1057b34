"""Mutants that hold more than their share between steps; numbers and the adapter's reads are right."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from engine.adapters.reference import PreparedReference, ReferenceEngine
from engine.contract import Plan, PreparedModel

__all__ = [
    "AveragesWholeParameters",
    "CutsGradientsFromWholeBuffers",
    "CutsStateFromWholeBuffers",
    "KeepsTheModelInAClosure",
    "KeepsTheModelOnTheLastRank",
    "KeepsWholesAfterTheFirstStep",
]

_MOMENTUM = 0.9


class KeepsTheModelInAClosure(ReferenceEngine):
    """Shards a model, and keeps the parameters it was built with in a closure.

    After pytorch/pytorch#114299: the parameters of a module that was not built on the meta device stayed allocated.
    """

    name = "mutant.KeepsTheModelInAClosure"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Copy every parameter, then shard honestly."""
        wholes = [parameter.detach().clone() for parameter in model.parameters()]
        prepared = super().prepare(model, plan, mesh)
        if self._keeps():
            prepared.module.register_forward_pre_hook(lambda *_: _look(wholes))
        return prepared

    def _keeps(self) -> bool:
        return True


class KeepsTheModelOnTheLastRank(KeepsTheModelInAClosure):
    """One rank alone keeps the whole model beside its shards.

    After verl-project/verl#5125: the first rank of each node held a whole state dict that nothing freed.
    """

    name = "mutant.KeepsTheModelOnTheLastRank"

    def _keeps(self) -> bool:
        return dist.get_rank() == dist.get_world_size() - 1


class _PreparedAverage(PreparedReference):
    """Looks at every unit's whole parameters after its forward, and averages them in a list outside the module."""

    first_step: ClassVar[int] = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._averages: dict[tuple[nn.Module, str], torch.Tensor] = {}
        self._num_steps = 0
        for module in self.module.modules():
            # First of the hooks: afterwards there are shards again.
            module.register_forward_hook(self._look, prepend=True)

    def step(self) -> None:
        """Update the parameters, and count."""
        super().step()
        self._num_steps += 1

    @torch.no_grad()
    def _look(self, module: nn.Module, *_: Any) -> None:
        if self._num_steps < self.first_step:
            return
        for name, parameter in module.named_parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                average = self._averages.setdefault((module, name), parameter.detach().clone())
                average.lerp_(parameter, 1 - _MOMENTUM)


class AveragesWholeParameters(ReferenceEngine):
    """Keeps a moving average of the parameters, whole on every rank.

    After TencentARC/RollingForcing#15: the average of sharded parameters was a full copy on each rank.
    """

    name = "mutant.AveragesWholeParameters"
    prepared_type = _PreparedAverage


class _PreparedLateAverage(_PreparedAverage):
    first_step = 1


class KeepsWholesAfterTheFirstStep(ReferenceEngine):
    """The first step leaves shards alone, and every later one whole parameters beside them.

    After pytorch/pytorch#147179: memory ran out in the second iteration, where parameters had been gathered again.
    """

    name = "mutant.KeepsWholesAfterTheFirstStep"
    prepared_type = _PreparedLateAverage


class _PreparedWithWholeGradients(PreparedReference):
    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        for parameter in self.owned_parameters().values():
            if isinstance(parameter.grad, DTensor):
                parameter.grad = _cut_from_a_whole(parameter.grad)


class CutsGradientsFromWholeBuffers(ReferenceEngine):
    """A rank's gradients are views of buffers that are as large as the whole gradients.

    After hpcaitech/ColossalAI#1955: under ZeRO-2 the gradients of all ranks stayed in memory.
    """

    name = "mutant.CutsGradientsFromWholeBuffers"
    prepared_type = _PreparedWithWholeGradients


class _PreparedWithWholeState(PreparedReference):
    def step(self) -> None:
        super().step()
        for state in self._built_optimizer().state.values():
            for key, value in state.items():
                if isinstance(value, DTensor):
                    state[key] = _cut_from_a_whole(value)


class CutsStateFromWholeBuffers(ReferenceEngine):
    """A rank's optimizer state is made of views of tensors that are as large as the whole state.

    After cloneofsimo/min-fsdp#1: under the name of ZeRO-1 something else than the optimizer state was cut.
    """

    name = "mutant.CutsStateFromWholeBuffers"
    prepared_type = _PreparedWithWholeState


def _look(_: object) -> None:
    """Do nothing; what keeps the argument is the closure around the call."""


def _cut_from_a_whole(sharded: DTensor) -> DTensor:
    """Return the same shard, as a view of memory for the whole."""
    local = sharded.to_local()
    whole = local.new_zeros(sharded.numel())
    view = whole[: local.numel()].view(local.shape)
    view.copy_(local)
    return DTensor.from_local(
        view,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )
