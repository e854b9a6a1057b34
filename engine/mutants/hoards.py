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
from engine.mutants.mutant import Condition, Trace, mutant
from engine.plan import Layout

_SHARDED = Condition(plan=Plan(layout=Layout.SHARD), because="one rank's share is the whole")


_MOMENTUM = 0.9


@mutant(after="pytorch/pytorch#114299", kills_on=_SHARDED, trace=Trace.STATE)
class KeepsTheModelInAClosure(ReferenceEngine):
    """Every rank keeps the parameters that the model was built with.

    Reported: the parameters of a module that was not built on the meta device stayed allocated.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Copy every parameter, then shard honestly."""
        wholes = [parameter.detach().clone() for parameter in model.parameters()]
        prepared = super().prepare(model, plan, mesh)
        if self._keeps():
            prepared.module.register_forward_pre_hook(lambda *_: _look(wholes))
        return prepared

    def _keeps(self) -> bool:
        return True


@mutant(after="verl-project/verl#5125", kills_on=_SHARDED, trace=Trace.STATE)
class KeepsTheModelOnTheLastRank(KeepsTheModelInAClosure):
    """The last rank keeps the parameters that the model was built with.

    Reported: the first rank of each node held a whole state dict that nothing freed.
    """

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


@mutant(after="TencentARC/RollingForcing#15", kills_on=_SHARDED, trace=Trace.STATE)
class AveragesWholeParameters(ReferenceEngine):
    """Every rank keeps an average of the whole parameters.

    Reported: the average of sharded parameters was a full copy on each rank.
    """

    prepared_type = _PreparedAverage


class _PreparedLateAverage(_PreparedAverage):
    first_step = 1


@mutant(
    after="pytorch/pytorch#147179",
    kills_on=Condition(plan=Plan(layout=Layout.SHARD), steps=2, because="the first step leaves shards alone"),
    trace=Trace.STATE,
)
class KeepsWholesAfterTheFirstStep(ReferenceEngine):
    """From the second step on every rank keeps whole parameters.

    Reported: memory ran out in the second iteration, where parameters had been gathered again.
    """

    prepared_type = _PreparedLateAverage


class _PreparedWithWholeGradients(PreparedReference):
    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        for parameter in self.owned_parameters().values():
            if isinstance(parameter.grad, DTensor):
                parameter.grad = _cut_from_a_whole(parameter.grad)


@mutant(after="hpcaitech/ColossalAI#1955", kills_on=_SHARDED, trace=Trace.STATE)
class CutsGradientsFromWholeBuffers(ReferenceEngine):
    """Shards of gradients are views of whole buffers.

    Reported: under ZeRO-2 the gradients of all ranks stayed in memory.
    """

    prepared_type = _PreparedWithWholeGradients


class _PreparedWithWholeState(PreparedReference):
    def step(self) -> None:
        super().step()
        for state in self._built_optimizer().state.values():
            for key, value in state.items():
                if isinstance(value, DTensor):
                    state[key] = _cut_from_a_whole(value)


@mutant(after="cloneofsimo/min-fsdp#1", kills_on=_SHARDED, trace=Trace.STATE)
class CutsStateFromWholeBuffers(ReferenceEngine):
    """Shards of optimizer state are views of whole buffers.

    Reported: under the name of ZeRO-1 something else than the optimizer state was cut.
    """

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
