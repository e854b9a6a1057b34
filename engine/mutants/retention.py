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
from engine.mutants.mutant import Condition, Trace, mutant
from engine.mutants.plans import SHARDED_BLOCKS
from engine.mutants.reference_insides import reference_groups

_KEPT = replace(SHARDED_BLOCKS, reshard=Reshard.KEEP)


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


@mutant(after="pytorch/pytorch#95805", kills_on=Condition(plan=SHARDED_BLOCKS), trace=Trace.STATE)
class KeepsUnitsUntilBackwardEnds(FullyShardEngine):
    """Backward frees no unit before the last of them has run.

    Reported: what backward had gathered was not freed, and memory grew layer by layer.
    """

    prepared_type = _PreparedLateFsdp2


@mutant(after="pytorch/xla#5484", kills_on=Condition(plan=SHARDED_BLOCKS), trace=Trace.STATE)
class FreesAllUnitsTogether(ReferenceEngine):
    """All units are freed together when the last has run backward.

    Reported: parameters that were gathered in backward stayed until its end.
    """

    prepared_type = _PreparedLateReference


@mutant(after="pytorch/pytorch#149029", kills_on=Condition(plan=SHARDED_BLOCKS), trace=Trace.STATE)
class KeepsGatherOutputs(FullyShardEngine):
    """The output of each gather is kept until the step.

    Reported: memory that was to be free after each layer's forward grew with every forward.
    """

    prepared_type = KeepingFsdp2

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then keep the output of each gather."""
        prepared = super().prepare(model, plan, mesh)
        return taking(prepared, groups, before, "wait_for_unshard", _keep_output)


@mutant(after="pytorch/pytorch#154704", kills_on=Condition(plan=SHARDED_BLOCKS), trace=Trace.STATE)
class KeepsBuffersUntilTheStep(ReferenceEngine):
    """Buffers of gathers are taken back and lent to nobody until the step.

    Reported: memory that was taken for granted to be needed again soon was not freed.
    """

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


@mutant(after="pytorch/pytorch#75892", kills_on=Condition(plan=SHARDED_BLOCKS), trace=Trace.STATE)
class RemembersAUnit(FullyShardEngine):
    """Whole parameters of one unit are kept from step to step.

    Reported: what one iteration had left gathered changed what the next one gathered.
    """

    prepared_type = _PreparedRememberingFsdp2


@mutant(after="pytorch/pytorch#75901", kills_on=Condition(plan=SHARDED_BLOCKS), trace=Trace.STATE)
class RemembersAUnitOfTheReference(ReferenceEngine):
    """One unit's last gather outlives the step.

    Reported: parameters stayed whole from an iteration into the next.
    """

    prepared_type = _PreparedRememberingReference


@mutant(after="deepspeedai/DeepSpeed#1069", kills_on=Condition(plan=SHARDED_BLOCKS), trace=Trace.STATE)
class PrefetchesEverything(FullyShardEngine):
    """Each unit asks for the gathers of all that follow.

    Reported: which gathers were issued ahead was not what had been chosen.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard by a plan without bounds."""
        return super().prepare(model, _unbounded(plan), mesh)


@mutant(after="deepspeedai/DeepSpeed#1069", kills_on=Condition(plan=SHARDED_BLOCKS), trace=Trace.STATE)
class GathersEverythingAhead(ReferenceEngine):
    """All units are on their way together.

    Reported: which gathers were issued ahead was not what had been chosen.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard by a plan without bounds."""
        return super().prepare(model, _unbounded(plan), mesh)


@mutant(after="pytorch/PiPPy#1105", kills_on=Condition(plan=_KEPT), trace=Trace.STATE)
class GathersAgainWhatItWasAskedToKeep(ReferenceEngine):
    """Parameters that were to be kept are freed and gathered again.

    Reported: beside a pipeline the policy had to be to free, although keeping was wanted.
    """

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
    if group._pending_gather is not None:
        kept.append(group._pending_gather.output)
        group.comm_ctx.recycle = _ignore


def _ignore(*_: Any) -> None:
    return None
