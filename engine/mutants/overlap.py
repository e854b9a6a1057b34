"""Mutants that train right and communicate what they should, yet not while units compute, or not ahead as asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine.adapters.reference import ReferenceEngine
from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.contract import Plan, Prefetch, PreparedModel, Reshard
from engine.mutants.fsdp2_insides import after_method
from engine.mutants.order import Lists
from engine.mutants.reference_insides import reference_groups, reference_units
from engine.reference.unit import BackwardGuess

__all__ = [
    "FreesUnitsTogether",
    "GathersEverythingFirst",
    "PrefetchesAfterItsTurn",
    "PrefetchesOneTooFew",
    "PrefetchesTheUnitAfterNext",
    "WaitsForEachGather",
    "WaitsForEachReduction",
    "WaitsWhereItGathers",
    "WaitsWhereItReduces",
]

# Any, throughout: FSDP2's insides and the streams of a device have no public types.


class WaitsForEachGather(FullyShardEngine):
    """The stream on which units compute waits for a gather as soon as it is issued, however far ahead.

    After deepspeedai/DeepSpeed#7804: communication that was to overlap did not.
    """

    name = "mutant.WaitsForEachGather"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then wait for the event of each gather at once."""

        def wait(group: Any) -> None:
            if group._all_gather_result is not None:
                torch.cpu.current_stream().wait_event(group._all_gather_result.all_gather_event)

        return after_method(super().prepare(model, plan, mesh), "unshard", wait)


class WaitsForEachReduction(FullyShardEngine):
    """The stream on which units compute waits for a reduction as soon as it is issued.

    After deepspeedai/DeepSpeed#7804: reductions that were to overlap backward held it up, one by one.
    """

    name = "mutant.WaitsForEachReduction"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then wait for the event of each reduction at once."""

        def wait(group: Any) -> None:
            if group._post_reduce_event is not None:
                torch.cpu.current_stream().wait_event(group._post_reduce_event)

        return after_method(super().prepare(model, plan, mesh), "post_backward", wait)


class WaitsWhereItGathers(ReferenceEngine):
    """Every gather is waited for where it is issued: what was to be on its way is there, and nothing overlapped.

    After deepspeedai/DeepSpeed#1069: gathers ahead of use were planned, and none ever ran ahead.
    """

    name = "mutant.WaitsWhereItGathers"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then have each group wait in the call that gathers."""
        prepared = super().prepare(model, plan, mesh)
        for group in reference_groups(prepared):
            group.unshard = _both(group.unshard, group.wait)  # type: ignore[method-assign]  # of this one alone
        return prepared


class WaitsWhereItReduces(ReferenceEngine):
    """Every reduction is waited for where it is issued.

    After deepspeedai/DeepSpeed#7804: reductions that were to overlap backward held it up, one by one.
    """

    name = "mutant.WaitsWhereItReduces"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then finish what is in flight whenever a unit has reduced."""
        prepared = super().prepare(model, plan, mesh)
        for group in reference_groups(prepared):
            group.reduce_gradients = _both(group.reduce_gradients, _finisher(group))  # type: ignore[method-assign]
        return prepared


class PrefetchesAfterItsTurn(ReferenceEngine):
    """Backward gathers the next unit once the present one is computed: the same calls in the same order, too late.

    After pytorch/pytorch#106030: backward prefetching was broken without a sign, for nothing tested it.
    """

    name = "mutant.PrefetchesAfterItsTurn"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then predict at the end of each turn."""
        prepared = super().prepare(model, plan, mesh)
        for unit in reference_units(prepared):
            unit.guesses_in_backward = BackwardGuess.LAST
        return prepared


class PrefetchesOneTooFew(FullyShardEngine):
    """Each list of units to prefetch lacks its last one.

    After deepspeedai/DeepSpeed#1069: the position in the order of gathers was off by one.
    """

    name = "mutant.PrefetchesOneTooFew"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, with shorter lists; one that is empty asks for the unit itself, which is whole."""
        return super().prepare(model, _with_lists(plan, _shorter), mesh)


class PrefetchesTheUnitAfterNext(FullyShardEngine):
    """Each list of units to prefetch begins one unit too late, so that the next one is gathered when it is needed.

    After deepspeedai/DeepSpeed#1069: the position in the order of gathers was off by one.
    """

    name = "mutant.PrefetchesTheUnitAfterNext"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, with lists that are moved by one."""
        return super().prepare(model, _with_lists(plan, _later), mesh)


class _PreparedGreedy(PreparedFullyShard):
    def __call__(self, *inputs: torch.Tensor) -> Any:  # Any: a model returns what it likes
        for unit in ("", *self.plan.units):
            self.units()[unit].unshard()
        return super().__call__(*inputs)


class GathersEverythingFirst(FullyShardEngine):
    """Forward begins with the gathers of all units, in the right order: the whole model is in memory at once.

    After NVIDIA/Megatron-LM#6153: units that nobody was about to use were gathered ahead, and kept.
    """

    name = "mutant.GathersEverythingFirst"
    prepared_type = _PreparedGreedy


class _PreparedTidyAtLast(PreparedFullyShard):
    def __init__(self, module: nn.Module, plan: Plan) -> None:
        super().__init__(module, plan)
        self._is_late = plan.reshard is Reshard.AFTER_FORWARD
        for unit in self.units().values() if self._is_late else ():
            unit.set_reshard_after_forward(is_on=False)

    def __call__(self, *inputs: torch.Tensor) -> Any:  # Any: as above
        output = super().__call__(*inputs)
        for unit in self.units().values() if self._is_late else ():
            unit.reshard()
        return output


class FreesUnitsTogether(FullyShardEngine):
    """Units are freed when the whole forward is over, and not each after its own: calls are the same, memory is not.

    After pytorch/pytorch#118118: units that a heuristic expected to be needed were left gathered.
    """

    name = "mutant.FreesUnitsTogether"
    prepared_type = _PreparedTidyAtLast


def _both(first: Callable[[], None], then: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        first()
        then()

    return call


def _finisher(group: Any) -> Callable[[], None]:
    def finish() -> None:
        group.lanes.finish()  # asked for late: lanes are shared once the root has run

    return finish


def _with_lists(plan: Plan, change: Callable[[Lists, tuple[str, ...]], Lists]) -> Plan:
    if plan.prefetch is None:
        return plan
    lists = Prefetch(
        forward=change(plan.prefetch.forward, plan.units),
        backward=change(plan.prefetch.backward, plan.units[::-1]),
    )
    return replace(plan, prefetch=lists)


def _shorter(lists: Lists, order: tuple[str, ...]) -> Lists:
    return tuple((unit, targets[:-1] or (unit,)) for unit, targets in lists)


def _later(lists: Lists, order: tuple[str, ...]) -> Lists:
    def moved(targets: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(order[i + 1] for i in map(order.index, targets) if i + 1 < len(order))

    return tuple((unit, moved(targets) or (unit,)) for unit, targets in lists)
