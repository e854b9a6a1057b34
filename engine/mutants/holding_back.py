"""Mutants that hold back other reductions than they were told to, or lose or keep what they must not meanwhile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine.adapters.composable import ComposableUnit
from engine.adapters.reference import PreparedReference, ReferenceEngine
from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.contract import Plan, Prefetch, PreparedModel
from engine.reference.unit import unit_of

__all__ = [
    "AcceptsNoReduceBuffers",
    "ForgetsTheSecondBackward",
    "HoldsTheWholeTreeBack",
    "IgnoresSingleHolds",
    "LosesWhatItHeldBack",
    "ReducesReplicasAllTheSame",
    "ReducesWithoutBound",
    "SplitsJointUnits",
    "TakesAllUnitsForOne",
]


_MANY = 1000  # more reductions than any model here has


class _DeafUnit(ComposableUnit):
    def set_gradient_sync(self, *, is_on: bool) -> None:
        pass


class _PreparedDeaf(PreparedReference):
    unit_type = _DeafUnit


class IgnoresSingleHolds(ReferenceEngine):
    """Only the whole model can be held back: what a single unit is told has no effect.

    After Haian-Jin/LVSM#22: neither the code nor its correction held any reduction back.
    """

    name = "mutant.IgnoresSingleHolds"
    prepared_type = _PreparedDeaf


class _FarReachingUnit(ComposableUnit):
    def set_gradient_sync(self, *, is_on: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(is_on)


class _PreparedFarReaching(PreparedReference):
    unit_type = _FarReachingUnit


class HoldsTheWholeTreeBack(ReferenceEngine):
    """What a unit is told reaches all units inside it: less is reduced than was asked for, with right numbers.

    After huggingface/accelerate#2790: a flag about synchronisation reached further than it was meant to.
    """

    name = "mutant.HoldsTheWholeTreeBack"
    prepared_type = _PreparedFarReaching


class _ForgetfulUnit(ComposableUnit):
    def set_gradient_sync(self, *, is_on: bool) -> None:
        super().set_gradient_sync(is_on=is_on)
        if is_on:
            unit = unit_of(self._first)
            for group in () if unit is None else unit.groups:
                group.drop_gradients()


class _PreparedForgetfulUnits(PreparedReference):
    unit_type = _ForgetfulUnit


class LosesWhatItHeldBack(ReferenceEngine):
    """A unit that was held back and is to reduce again has forgotten the microbatches before.

    After NVIDIA/Megatron-LM#7186: every backward was treated as the last, and cleared what was accumulated.
    """

    name = "mutant.LosesWhatItHeldBack"
    prepared_type = _PreparedForgetfulUnits


class _SynchronousUnit(ComposableUnit):
    def set_replica_sync(self, *, is_on: bool) -> None:
        pass


class _PreparedSynchronous(PreparedReference):
    unit_type = _SynchronousUnit


class ReducesReplicasAllTheSame(ReferenceEngine):
    """Told to reduce within each replica alone, a unit reduces across replicas too.

    After NVIDIA/Megatron-LM#7186: collectives across replicas were as many as microbatches, and not one.
    """

    name = "mutant.ReducesReplicasAllTheSame"
    prepared_type = _PreparedSynchronous


class _UnitWithoutGathers(ComposableUnit):
    def reshard(self) -> None:
        super().reshard()
        self._first.set_unshard_in_backward(False)


class _PreparedSpent(PreparedFullyShard):
    """Counts forwards that wait for their backward; the first backward frees what the others need for good."""

    unit_type = _UnitWithoutGathers

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        super().__init__(module, plan)
        self._num_waiting = 0

    def __call__(self, *inputs: torch.Tensor) -> Any:  # Any: a model returns what it likes
        self._num_waiting += 1
        return super().__call__(*inputs)

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        self._num_waiting -= 1
        if self._num_waiting:
            for unit in self.units().values():
                unit.reshard()


class ForgetsTheSecondBackward(FullyShardEngine):
    """With two forwards before two backwards, the second backward finds parameters freed.

    After pytorch/pytorch#136861: the flag that has backward gather was cleared by the first backward.
    """

    name = "mutant.ForgetsTheSecondBackward"
    prepared_type = _PreparedSpent


class ReducesWithoutBound(ReferenceEngine):
    """However few reductions may hold their input, none is waited for before backward is over.

    After deepspeedai/DeepSpeed#7188: a buffer was taken for the next reduction without regard to the last.
    """

    name = "mutant.ReducesWithoutBound"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, with a bound that is none."""
        return super().prepare(model, replace(plan, max_reduce_buffers=_MANY), mesh)


class AcceptsNoReduceBuffers(FullyShardEngine):
    """A bound of no reduction at all, with which none could ever start, is taken for one.

    After Tencent-Hunyuan/UniRL#410: what was asked for was silently replaced by something else.
    """

    name = "mutant.AcceptsNoReduceBuffers"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, with a bound that can be kept."""
        bound = None if plan.max_reduce_buffers is None else max(1, plan.max_reduce_buffers)
        return super().prepare(model, replace(plan, max_reduce_buffers=bound), mesh)


class SplitsJointUnits(FullyShardEngine):
    """Modules that were to be one group are groups of their own: more calls, of fewer bytes each.

    After Tencent-Hunyuan/UniRL#410: what was asked for silently became something else.
    """

    name = "mutant.SplitsJointUnits"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard each module by itself."""
        split = tuple(name for unit in plan.units for name in unit.split(","))
        lists = None if plan.prefetch is None else Prefetch()
        return super().prepare(model, replace(plan, units=split, prefetch=lists), mesh)


class TakesAllUnitsForOne(ReferenceEngine):
    """All parameters are one group, whatever units were asked for: fewer calls, and the whole model in memory at once.

    After facebookresearch/fairscale#791: modules below a size that nobody had chosen were left to the outermost unit.
    """

    name = "mutant.TakesAllUnitsForOne"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Hand over the model as a whole."""
        return super().prepare(model, replace(plan, units=()), mesh)
