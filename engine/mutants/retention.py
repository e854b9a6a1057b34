"""Mutants that keep whole parameters, or the buffers of gathers, for longer than they must; the numbers are right.

Several sins are committed on both engines: what is mixed in is the same, as both are driven by the same handles.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from engine.adapters.composable import PreparedComposable
from engine.adapters.reference import PreparedReference, ReferenceEngine
from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.contract import Plan, Prefetch, PreparedModel, Reshard
from engine.mutants.calls import before
from engine.mutants.fsdp2_insides import groups
from engine.mutants.keeping import KeepingFsdp2, KeepingReference, taking
from engine.mutants.reference_insides import reference_groups

__all__ = [
    "FreesAllUnitsTogether",
    "GathersAgainWhatItWasAskedToKeep",
    "GathersEverythingAhead",
    "KeepsBuffersUntilTheStep",
    "KeepsGatherOutputs",
    "KeepsUnitsUntilBackwardEnds",
    "PrefetchesEverything",
    "RemembersAUnit",
    "RemembersAUnitOfTheReference",
]

# Any, throughout: FSDP2's insides have no public types.


class _FreesLate(PreparedComposable):
    """Keeps what backward gathers until all of it has run; to be mixed in."""

    def backward(self, loss: torch.Tensor) -> None:
        units = self.units().values()
        for unit in units:
            unit.set_reshard_after_backward(is_on=False)
        super().backward(loss)
        for unit in units:
            unit.reshard()


class _PreparedLateFsdp2(_FreesLate, PreparedFullyShard):
    pass


class _PreparedLateReference(_FreesLate, PreparedReference):
    pass


class KeepsUnitsUntilBackwardEnds(FullyShardEngine):
    """Backward frees no unit before the last has run, so that its memory grows unit by unit.

    After pytorch/pytorch#95805: what backward had gathered was not freed, and memory grew layer by layer.
    """

    name = "mutant.KeepsUnitsUntilBackwardEnds"
    prepared_type = _PreparedLateFsdp2


class FreesAllUnitsTogether(ReferenceEngine):
    """All units are freed together, when the last of them has run backward.

    After pytorch/xla#5484: parameters that were gathered in backward stayed until its end.
    """

    name = "mutant.FreesAllUnitsTogether"
    prepared_type = _PreparedLateReference


class KeepsGatherOutputs(FullyShardEngine):
    """The buffer that a gather wrote to is kept until the step, although parameters were copied out of it.

    After pytorch/pytorch#149029: memory that was to be free after each layer's forward grew with every forward.
    """

    name = "mutant.KeepsGatherOutputs"
    prepared_type = KeepingFsdp2

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then keep the output of each gather."""
        prepared = super().prepare(model, plan, mesh)
        return taking(prepared, groups, before, "wait_for_unshard", _keep_output)


class KeepsBuffersUntilTheStep(ReferenceEngine):
    """A gather's buffer is not used again but kept until the step, one for each gather.

    After pytorch/pytorch#154704: memory that was taken for granted to be needed again soon was not freed.
    """

    name = "mutant.KeepsBuffersUntilTheStep"
    prepared_type = KeepingReference

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then take buffers back and lend them to nobody."""
        prepared = super().prepare(model, plan, mesh)
        return taking(prepared, reference_groups, before, "wait", _keep_buffer)


class _Remembering(PreparedComposable):
    """Keeps a copy of the first unit's whole parameters until that unit runs again; to be mixed in."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._copies: list[torch.Tensor] = []
        # First of the hooks: afterwards there are shards again.
        self.part(self.plan.units[0]).register_forward_hook(self._remember, prepend=True)

    def _remember(self, module: nn.Module, *_: Any) -> None:
        with torch.no_grad():
            whole = (p for p in module.parameters() if not isinstance(p, DTensor))
            self._copies = [parameter.detach().clone() for parameter in whole]


class _PreparedRememberingFsdp2(_Remembering, PreparedFullyShard):
    pass


class _PreparedRememberingReference(_Remembering, PreparedReference):
    pass


class RemembersAUnit(FullyShardEngine):
    """Whole parameters of one unit are kept from one step to the next.

    After pytorch/pytorch#75892: what one iteration had left gathered changed what the next one gathered.
    """

    name = "mutant.RemembersAUnit"
    prepared_type = _PreparedRememberingFsdp2


class RemembersAUnitOfTheReference(ReferenceEngine):
    """One unit's last gather outlives the step, until that unit is gathered anew.

    After pytorch/pytorch#75901: parameters stayed whole from an iteration into the next.
    """

    name = "mutant.RemembersAUnitOfTheReference"
    prepared_type = _PreparedRememberingReference


class PrefetchesEverything(FullyShardEngine):
    """Each unit asks for the gathers of all that follow, at once.

    After deepspeedai/DeepSpeed#1069: which gathers were issued ahead was not what had been chosen.
    """

    name = "mutant.PrefetchesEverything"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard by a plan without bounds."""
        return super().prepare(model, _unbounded(plan), mesh)


class GathersEverythingAhead(ReferenceEngine):
    """The first unit of each pass asks for all the others, so that all are on their way together.

    After deepspeedai/DeepSpeed#1069: which gathers were issued ahead was not what had been chosen.
    """

    name = "mutant.GathersEverythingAhead"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard by a plan without bounds."""
        return super().prepare(model, _unbounded(plan), mesh)


class GathersAgainWhatItWasAskedToKeep(ReferenceEngine):
    """Asked to keep parameters until backward, it frees them too early and gathers them again.

    After pytorch/PiPPy#1105: beside a pipeline the policy had to be to free, although keeping was wanted.
    """

    name = "mutant.GathersAgainWhatItWasAskedToKeep"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard by another policy."""
        is_kept = plan.reshard is Reshard.KEEP
        return super().prepare(model, replace(plan, reshard=Reshard.AFTER_FORWARD) if is_kept else plan, mesh)


def _unbounded(plan: Plan) -> Plan:
    distance = len(plan.units)
    return replace(plan, prefetch=Prefetch.by_distance(plan.units, forward=distance, backward=distance))


def _keep_output(group: Any, kept: list[Any]) -> None:
    if group._all_gather_result is not None:
        kept.append(group._all_gather_result.all_gather_output)


def _keep_buffer(group: Any, kept: list[Any]) -> None:
    if group._gather is not None:
        kept.append(group._gather.output)
        group.lanes.give_back = _ignore


def _ignore(*_: Any) -> None:
    return None
