"""Mutants that hold memory for longer than they must, or let go of what is not theirs; the numbers are right.

Several sins are committed on both engines: what is mixed in is the same, as both are driven by the same handles.
"""

from __future__ import annotations

from collections.abc import Callable
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
from engine.reference.group import Group
from engine.reference.unit import unit_of

__all__ = [
    "FreesAllUnitsTogether",
    "FreesTheUsersInputs",
    "FreesTheUsersOutputs",
    "GathersAgainWhatItWasAskedToKeep",
    "GathersEverythingAhead",
    "KeepsBuffersUntilTheStep",
    "KeepsGatherOutputs",
    "KeepsGradientsUntilTheStep",
    "KeepsUnitsUntilBackwardEnds",
    "KeepsWholeGradients",
    "PilesUpGradients",
    "PilesUpReduceInputs",
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


class _Keeping(PreparedComposable):
    """Has a place for what it should let go; empty again once the optimizer has stepped, unless it grows."""

    grows = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: list[Any] = []

    def step(self) -> None:
        super().step()
        if not self.grows:
            self.kept.clear()


class _KeepingFsdp2(_Keeping, PreparedFullyShard):
    pass


class _KeepingReference(_Keeping, PreparedReference):
    pass


class _GrowingFsdp2(_KeepingFsdp2):
    grows = True


class KeepsGatherOutputs(FullyShardEngine):
    """The buffer that a gather wrote to is kept until the step, although parameters were copied out of it.

    After pytorch/pytorch#149029: memory that was to be free after each layer's forward grew with every forward.
    """

    name = "mutant.KeepsGatherOutputs"
    prepared_type = _KeepingFsdp2

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then keep the output of each gather."""
        prepared = super().prepare(model, plan, mesh)
        assert isinstance(prepared, _Keeping)
        for group in _fsdp2_groups(prepared):
            _before(group, "wait_for_unshard", _keep_output, prepared.kept)
        return prepared


class KeepsBuffersUntilTheStep(ReferenceEngine):
    """A gather's buffer is not used again but kept until the step, one for each gather.

    After pytorch/pytorch#154704: memory that was taken for granted to be needed again soon was not freed.
    """

    name = "mutant.KeepsBuffersUntilTheStep"
    prepared_type = _KeepingReference

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then take buffers back and lend them to nobody."""
        prepared = super().prepare(model, plan, mesh)
        assert isinstance(prepared, _Keeping)
        for group in _reference_groups(prepared):
            _before(group, "wait", _keep_buffer, prepared.kept)
        return prepared


class PilesUpReduceInputs(FullyShardEngine):
    """The input of every reduction is added to a list that nobody empties.

    After hpcaitech/ColossalAI#741: a sharded model's memory grew with every backward.
    """

    name = "mutant.PilesUpReduceInputs"
    prepared_type = _GrowingFsdp2

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then keep the input of each reduction."""
        prepared = super().prepare(model, plan, mesh)
        assert isinstance(prepared, _Keeping)
        for group in _fsdp2_groups(prepared):
            _after(group, "post_backward", _keep_reduce_input, prepared.kept)
        return prepared


class _PreparedPiling(_KeepingReference):
    grows = True

    def step(self) -> None:
        self.kept += [p.grad for p in self.owned_parameters().values()]
        super().step()


class PilesUpGradients(ReferenceEngine):
    """Reduced gradients of every step are added to a list that nobody empties.

    After hpcaitech/ColossalAI#741: a sharded model's memory grew with every backward.
    """

    name = "mutant.PilesUpGradients"
    prepared_type = _PreparedPiling


class KeepsWholeGradients(FullyShardEngine):
    """Whole gradients are kept until the step, although they were packed and reduced.

    After pytorch/pytorch#169349: live memory grew over a backward.
    """

    name = "mutant.KeepsWholeGradients"
    prepared_type = _KeepingFsdp2

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then keep the gradients that each reduction begins with."""
        prepared = super().prepare(model, plan, mesh)
        assert isinstance(prepared, _Keeping)
        for group in _fsdp2_groups(prepared):
            _before(group, "post_backward", _keep_gradients, prepared.kept)
        return prepared


class KeepsGradientsUntilTheStep(ReferenceEngine):
    """Each unit's gradients stay whole beside their reduced shards until the step.

    After pytorch/pytorch#169349: live memory grew over a backward.
    """

    name = "mutant.KeepsGradientsUntilTheStep"
    prepared_type = _KeepingReference

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then keep the gradients that each reduction begins with."""
        prepared = super().prepare(model, plan, mesh)
        assert isinstance(prepared, _Keeping)
        for group in _reference_groups(prepared):
            _before(group, "reduce_gradients", _keep_reference_gradients, prepared.kept)
        return prepared


class _Grasping(PreparedComposable):
    """Frees the memory of what it was given or has handed out, once backward is over; to be mixed in."""

    frees_inputs = True

    def __call__(self, *inputs: torch.Tensor) -> Any:
        output = super().__call__(*inputs)
        self._seen = inputs if self.frees_inputs else (output,)
        return output

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        for tensor in self._seen:
            tensor.untyped_storage().resize_(0)


class _PreparedFreesInputs(_Grasping, PreparedFullyShard):
    pass


class _PreparedFreesOutputs(_Grasping, PreparedReference):
    frees_inputs = False


class FreesTheUsersInputs(FullyShardEngine):
    """After backward the memory of the inputs is given back, whoever holds them.

    After InternLM/xtuner#1948: the storage of a tensor that was not the engine's was freed with the parameters.
    """

    name = "mutant.FreesTheUsersInputs"
    prepared_type = _PreparedFreesInputs


class FreesTheUsersOutputs(ReferenceEngine):
    """After backward the memory of what the model returned is given back, whoever holds it.

    After InternLM/xtuner#1948: the storage of a tensor that was not the engine's was freed with the parameters.
    """

    name = "mutant.FreesTheUsersOutputs"
    prepared_type = _PreparedFreesOutputs


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


def _keep_reduce_input(group: Any, kept: list[Any]) -> None:
    if group.comm_ctx.reduce_scatter_states:
        kept.append(group.comm_ctx.reduce_scatter_states[-1].reduce_scatter_input)


def _keep_gradients(group: Any, kept: list[Any]) -> None:
    found = (p.unsharded_param for p in group.fsdp_params if hasattr(p, "_unsharded_param"))
    kept += [parameter.grad for parameter in found if parameter.grad is not None]


def _keep_buffer(group: Any, kept: list[Any]) -> None:
    if group._gather is not None:
        kept.append(group._gather.output)
        group.lanes.give_back = _ignore


def _keep_reference_gradients(group: Any, kept: list[Any]) -> None:
    found = (p.unsharded for p in group.parameters if p.unsharded is not None)
    kept += [parameter.grad for parameter in found if parameter.grad is not None]


def _before(holder: Any, method: str, sin: Callable[[Any, list[Any]], None], kept: list[Any]) -> None:
    """Have ``sin`` done before each call of a method of this one object."""
    honest = getattr(holder, method)

    def both(*args: Any, **kwargs: Any) -> Any:
        sin(holder, kept)
        return honest(*args, **kwargs)

    setattr(holder, method, both)


def _after(holder: Any, method: str, sin: Callable[[Any, list[Any]], None], kept: list[Any]) -> None:
    """Have ``sin`` done after each call of a method of this one object."""
    honest = getattr(holder, method)

    def both(*args: Any, **kwargs: Any) -> Any:
        result = honest(*args, **kwargs)
        sin(holder, kept)
        return result

    setattr(holder, method, both)


def _ignore(*_: Any) -> None:
    return None


def _fsdp2_groups(prepared: PreparedModel) -> list[Any]:
    modules: list[Any] = list(prepared.module.modules())
    states = dict.fromkeys(m._get_fsdp_state() for m in modules if hasattr(m, "_get_fsdp_state"))
    return [group for state in states for group in state._fsdp_param_groups]


def _reference_groups(prepared: PreparedModel) -> list[Group]:
    found = (unit_of(module) for module in prepared.module.modules())
    return [group for unit in dict.fromkeys(u for u in found if u is not None) for group in unit.groups]
