"""Mutants that gather and reduce in another order than they should, or ahead of use when they must not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine import reference
from engine.adapters.reference import PreparedReference, ReferenceEngine
from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.contract import Capability, Plan, Prefetch, PreparedModel
from engine.mutants.staleness import Stale
from engine.reference.collectives import DefaultAllGather
from engine.reference.unit import unit_of

__all__ = [
    "GathersSynchronously",
    "GathersTheLastUnitFirst",
    "IgnoresTheStepEvent",
    "KeepsMistakenPrefetches",
    "KeepsTheRootWhileAccumulating",
    "NeverPrefetches",
    "PrefetchesAgainInRecomputation",
    "PrefetchesOneTooFar",
    "PrefetchesStaleParameters",
    "ReadsTheGatherTooEarly",
    "ReducesInTheOrderOfForward",
    "SwapsPrefetchesOnTheLastRank",
]

Lists = tuple[tuple[str, tuple[str, ...]], ...]


class NeverPrefetches(FullyShardEngine):
    """Every unit is gathered when it is needed, whatever was asked for.

    After pytorch/pytorch#106030: backward prefetching was broken without a sign, for nothing tested it.
    """

    name = "mutant.NeverPrefetches"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly; each unit of a list asks for itself, which is whole by then."""
        if plan.prefetch is not None:
            none = Prefetch(forward=_themselves(plan.units), backward=_themselves(plan.units))
            plan = replace(plan, prefetch=none)
        return super().prepare(model, plan, mesh)


class PrefetchesOneTooFar(FullyShardEngine):
    """Each list of units to prefetch has one more at its end, if there is one: more memory than was meant.

    After deepspeedai/DeepSpeed#1069: the position in the order of gathers was off by one.
    """

    name = "mutant.PrefetchesOneTooFar"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, with longer lists."""
        if plan.prefetch is not None:
            longer = Prefetch(
                forward=_longer(plan.prefetch.forward, plan.units),
                backward=_longer(plan.prefetch.backward, plan.units[::-1]),
            )
            plan = replace(plan, prefetch=longer)
        return super().prepare(model, plan, mesh)


class SwapsPrefetchesOnTheLastRank(FullyShardEngine):
    """On the last rank lists of units to prefetch are turned around, so that ranks gather different units at once.

    After pytorch/pytorch#64629: one order over all ranks was taken for granted.
    """

    name = "mutant.SwapsPrefetchesOnTheLastRank"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, on the last rank with lists turned around."""
        if plan.prefetch is not None and dist.get_rank() == dist.get_world_size() - 1:
            turned = Prefetch(
                forward=_turned(plan.prefetch.forward), backward=_turned(plan.prefetch.backward)
            )
            plan = replace(plan, prefetch=turned)
        return super().prepare(model, plan, mesh)


class _PreparedEager(PreparedFullyShard):
    def __call__(self, *inputs: torch.Tensor) -> Any:  # Any: a model returns what it likes
        if self.plan.units:
            self.units()[self.plan.units[-1]].unshard()
        return super().__call__(*inputs)


class GathersTheLastUnitFirst(FullyShardEngine):
    """Forward begins with the gather of the unit that it needs last, which is whole all the while.

    After pytorch/pytorch#76553: the order recorded for gathers did not fit that in which modules ran.
    """

    name = "mutant.GathersTheLastUnitFirst"
    prepared_type = _PreparedEager


class _PreparedPatient(PreparedReference):
    """Has every group hold its gradients through backward, and reduces them all afterwards."""

    def backward(self, loss: torch.Tensor) -> None:
        groups = [
            group
            for name in (*self.plan.units, "")
            if (unit := unit_of(self.module.get_submodule(name.split(",")[0]))) is not None
            for group in unit.groups
        ]
        held = [group for group in groups if group.reduces]
        for group in held:
            group.reduces = False
        super().backward(loss)
        for group in held:
            group.reduces = True
            group.reduce_gradients()
            group.lanes.finish()


class ReducesInTheOrderOfForward(ReferenceEngine):
    """Gradients are reduced when backward is over, the first unit's first: nothing overlaps.

    After deepspeedai/DeepSpeed#7804: reductions that were to overlap backward came after it, one by one.
    """

    name = "mutant.ReducesInTheOrderOfForward"
    prepared_type = _PreparedPatient


class _PreparedRepetitive(PreparedFullyShard):
    """Does in a recomputed forward what the prefetch lists say of the first one, and frees it after backward."""

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        super().__init__(module, plan)
        self._is_backward = False
        for unit, targets in () if plan.prefetch is None else plan.prefetch.forward:
            self.module.get_submodule(unit).register_forward_pre_hook(self._repeat(targets))

    def backward(self, loss: torch.Tensor) -> None:
        self._is_backward = True
        super().backward(loss)
        self._is_backward = False
        for unit in self.units().values():
            unit.reshard()

    # Any: a hook, of which torch checks nothing.
    def _repeat(self, targets: tuple[str, ...]) -> Any:
        def repeat(*_: Any) -> None:
            if self._is_backward:
                for target in targets:
                    self.units()[target].unshard()

        return repeat


class PrefetchesAgainInRecomputation(FullyShardEngine):
    """A checkpointed unit that is run again in backward prefetches as in forward, units whose turn is over.

    After NVIDIA-NeMo/Automodel#3373: prefetching ran in the recomputed forward too; gradients were right.
    """

    name = "mutant.PrefetchesAgainInRecomputation"
    prepared_type = _PreparedRepetitive


class _PreparedRetentive(PreparedFullyShard):
    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        prefetch = self.plan.prefetch or Prefetch()
        for target in {target for _, targets in prefetch.backward for target in targets}:
            self.units()[target].unshard()


class KeepsMistakenPrefetches(FullyShardEngine):
    """What backward prefetched is whole when it ends, and still is when the parameters have been updated.

    After pytorch/pytorch#118118: a prefetch for a backward that never came left parameters gathered.
    """

    name = "mutant.KeepsMistakenPrefetches"
    prepared_type = _PreparedRetentive


class _PreparedReluctant(PreparedFullyShard):
    @contextmanager
    def accumulating(self) -> Iterator[None]:
        with super().accumulating():
            self.units()[""].set_reshard_after_backward(is_on=False)
            yield
            self.units()[""].set_reshard_after_backward(is_on=True)


class KeepsTheRootWhileAccumulating(FullyShardEngine):
    """The number of gathers depends on whether the microbatch before accumulated: the root stayed whole then.

    After pytorch/pytorch#75892: the root kept its parameters whole inside no_sync.
    """

    name = "mutant.KeepsTheRootWhileAccumulating"
    prepared_type = _PreparedReluctant


class _HastyAllGather:
    """Starts a gather and claims that its output may be read."""

    def __init__(self) -> None:
        self._honest = DefaultAllGather()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._honest.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._honest(output_tensor, input_tensor, group, async_op=True)
        return None


class ReadsTheGatherTooEarly(ReferenceEngine):
    """Nobody waits for a gather: forward reads whatever is in its output by then.

    After NVIDIA/Megatron-LM#663: with gathers overlapped, forward read parameters that had not arrived.
    """

    name = "mutant.ReadsTheGatherTooEarly"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then gather without waiting."""
        prepared = super().prepare(model, plan, mesh)
        for module in prepared.module.modules():
            if isinstance(module, reference.FSDPModule):
                module.set_custom_all_gather(_HastyAllGather())
        return prepared


class GathersSynchronously(FullyShardEngine):
    """Gathers block the rank although they were to be asynchronous.

    After deepspeedai/DeepSpeed#7804: communication that was to overlap did not.
    """

    name = "mutant.GathersSynchronously"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, under a plan without the demand."""
        return super().prepare(model, replace(plan, demands=plan.demands - {Capability.ASYNC_GATHER}), mesh)


class _PreparedStaleReference(Stale, PreparedReference):
    pass


class IgnoresTheStepEvent(ReferenceEngine):
    """Told of an event to wait for after the optimizer step, it gathers as if the step had not been.

    After NVIDIA/Megatron-LM#663: with overlapped gathering, forward read parameters of the step before.
    """

    name = "mutant.IgnoresTheStepEvent"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Go one step behind where the plan demands an event."""
        return _behind(super().prepare(model, plan, mesh), is_behind=Capability.STEP_EVENT in plan.demands)


class PrefetchesStaleParameters(ReferenceEngine):
    """With lists of units to prefetch, gathers start before the optimizer has stepped.

    After NVIDIA/Megatron-LM#4609: gathers that overlapped the step shared a buffer with what it was reading.
    """

    name = "mutant.PrefetchesStaleParameters"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Go one step behind where the plan has such lists."""
        return _behind(super().prepare(model, plan, mesh), is_behind=plan.prefetch is not None)


def _behind(prepared: PreparedModel, *, is_behind: bool) -> PreparedModel:
    assert isinstance(prepared, PreparedReference)
    if not is_behind:
        return prepared
    return _PreparedStaleReference(prepared.module, prepared.plan, prepared.door)


def _themselves(units: tuple[str, ...]) -> Lists:
    return tuple((unit, (unit,)) for unit in units)


def _turned(lists: Lists) -> Lists:
    return tuple((unit, targets[::-1]) for unit, targets in lists)


def _longer(lists: Lists, order: tuple[str, ...]) -> Lists:
    """Append to each list the unit that follows its last one."""
    return tuple(
        (unit, targets + order[order.index(targets[-1]) + 1 :][:1]) for unit, targets in lists if targets
    )
