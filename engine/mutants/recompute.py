"""Mutants for whom a forward that is run again in backward is a forward like any other, or none at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from engine.adapters.reference import PreparedReference, ReferenceEngine
from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.contract import Plan, PreparedModel
from engine.mutants.mutant import Condition, Trace, mutant
from engine.plan import Reshard


class _PreparedRecomputing(PreparedFullyShard):
    """Knows when a unit of its runs in a backward."""

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        super().__init__(module, plan)
        self._is_in_backward = False
        for unit in (m for m in module.modules() if isinstance(m, FSDPModule)):
            assert isinstance(unit, nn.Module)
            unit.register_forward_pre_hook(self._enter)
            unit.register_forward_hook(self._leave)

    def backward(self, loss: torch.Tensor) -> None:
        self._is_in_backward = True
        try:
            super().backward(loss)
        finally:
            self._is_in_backward = False

    def _enter(self, unit: nn.Module, inputs: Any) -> None:  # Any: a module takes what it likes
        if self._is_in_backward:
            self.begin_recompute(unit)

    def _leave(self, unit: nn.Module, inputs: Any, output: Any) -> None:  # Any: and returns it
        if self._is_in_backward:
            self.end_recompute(unit)

    def begin_recompute(self, unit: nn.Module) -> None:
        """Do nothing: mutants sin here."""

    def end_recompute(self, unit: nn.Module) -> None:
        """Do nothing: mutants sin here."""


class _PreparedHastyRecompute(_PreparedRecomputing):
    @torch.no_grad()
    def begin_recompute(self, unit: nn.Module) -> None:
        size = dist.get_world_size()
        for parameter in unit.parameters():
            if size > 1 and parameter.shape and parameter.shape[0] >= size:
                parameter.chunk(size)[-1].zero_()


@mutant(
    after="NVIDIA/Megatron-LM#6153",
    kills_on=Condition(because="one rank has all rows; units whose forward runs once meet whole parameters"),
)
class RecomputesBeforeTheGatherIsOver(FullyShardEngine):
    """A recomputed forward takes the last rank's rows for zeros.

    Reported: a recomputed forward met parameters that had not been gathered for it.
    """

    prepared_type = _PreparedHastyRecompute


class _PreparedWastefulRecompute(_PreparedRecomputing):
    def end_recompute(self, unit: nn.Module) -> None:
        assert isinstance(unit, FSDPModule)
        unit.reshard()
        unit.unshard()


@mutant(
    after="NVIDIA-NeMo/Automodel#3373",
    kills_on=Condition(
        steps=2,
        plan=Plan(reshard=Reshard.AFTER_FORWARD),
        because="one rank gathers nothing; counts hold from the second step on",
    ),
    trace=Trace.COMMUNICATION,
)
class GathersAgainAfterARecompute(FullyShardEngine):
    """Backward gathers a recomputed unit twice.

    Reported: with checkpointed blocks backward gathered parameters twice.
    """

    prepared_type = _PreparedWastefulRecompute


@mutant(
    after="meta-pytorch/autoparallel#469",
    kills_on=Condition(
        steps=2,
        plan=Plan(gathered_once=("token,position",)),
        because="one rank gathers nothing; counts hold from the second step on",
    ),
    trace=Trace.COMMUNICATION,
)
class GathersWhatBackwardDoesWithout(FullyShardEngine):
    """Units to be gathered for forward alone are gathered for backward too.

    Reported: parameters that were not to be gathered a second time were, where checkpoints were involved.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, under a plan without this wish."""
        return super().prepare(model, replace(plan, gathered_once=()), mesh)


class _PreparedDoubleCounting(PreparedReference):
    def __init__(self, module: nn.Module, plan: Plan, door: Any) -> None:  # Any: as the base class says
        super().__init__(module, plan, door)
        self._is_in_backward = False
        self._recomputed: set[nn.Module] = set()
        for inner in module.modules():
            inner.register_forward_pre_hook(self._enter)

    @torch.no_grad()
    def backward(self, loss: torch.Tensor) -> None:
        before = {p: p.grad.clone() for p in self.module.parameters() if p.grad is not None}
        self._is_in_backward = True
        with torch.enable_grad():
            super().backward(loss)
        self._is_in_backward = False
        for parameter in self._parameters_of_recomputed():
            if parameter.grad is not None:
                earlier = before.get(parameter)
                parameter.grad.mul_(2)
                if earlier is not None:
                    parameter.grad.sub_(earlier)
        self._recomputed.clear()

    def _parameters_of_recomputed(self) -> Iterator[nn.Parameter]:
        yield from {p: None for m in self._recomputed for p in m.parameters(recurse=False)}

    def _enter(self, module: nn.Module, inputs: Any) -> None:  # Any: a module takes what it likes
        if self._is_in_backward:
            self._recomputed.add(module)


@mutant(
    after="facebookresearch/fairscale#777",
    kills_on=Condition(world_size=1, because="without checkpoints nothing is computed again"),
)
class CountsRecomputedGradientsTwice(ReferenceEngine):
    """Gradients by way of a recomputed forward are doubled.

    Reported: gradients of a checkpointed module that was run several times were accumulated into what had been
    reduced already.
    """

    prepared_type = _PreparedDoubleCounting
