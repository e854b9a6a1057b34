"""Mutants that gather, prefetch or reduce in another order than they should, or without overlap with computation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine import reference
from shardproof.engine.adapters.reference import PreparedReference, ReferenceEngine
from shardproof.engine.adapters.reference_wrapper import ReferenceWrapperEngine
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from shardproof.engine.contract import Capability, Plan, Prefetch, PreparedModel, Reshard
from shardproof.engine.mutants.fsdp2_insides import groups, reference_groups, reference_units
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import (
    Lists,
    Stale,
    after,
    changing_lists,
    in_each,
    is_last_rank,
    undemanding,
)
from shardproof.engine.reference.autograd_hooks import WatchedForward
from shardproof.engine.reference.collectives import DefaultAllGather
from shardproof.engine.reference.fsdp_state import BackwardPrefetchTime, FSDPState, state_of
from shardproof.engine.reference.param_group import FSDPParamGroup, ShardedState
from shardproof.engine.reference.root_state import RootState


def _themselves(lists: Lists, order: tuple[str, ...]) -> Lists:
    """Make each unit prefetch itself, which is already gathered."""
    return tuple((unit, (unit,)) for unit in order)


def _longer(lists: Lists, order: tuple[str, ...]) -> Lists:
    """Append to each list the unit that follows its last one."""
    return tuple(
        (unit, targets + order[order.index(targets[-1]) + 1 :][:1]) for unit, targets in lists if targets
    )


def _turned_on_the_last_rank(lists: Lists, order: tuple[str, ...]) -> Lists:
    return tuple((unit, targets[::-1]) for unit, targets in lists) if is_last_rank() else lists


@mutant(after="pytorch/pytorch#106030", trace=Trace.COMMUNICATION)
class NeverPrefetches(FullyShardEngine):
    """Each unit is gathered when it is needed, although a prefetch list names it earlier."""

    misreads = changing_lists(_themselves)


@mutant(after="deepspeedai/DeepSpeed#1069", trace=Trace.COMMUNICATION)
class PrefetchesOneTooFar(FullyShardEngine):
    """One unit more is prefetched than the list names."""

    misreads = changing_lists(_longer)


@mutant(after="pytorch/pytorch#64629", trace=Trace.COMMUNICATION)
class SwapsPrefetchesOnTheLastRank(FullyShardEngine):
    """The last rank gathers prefetched units in another order than the others."""

    misreads = changing_lists(_turned_on_the_last_rank)


@mutant(after="pytorch/pytorch#76553", trace=Trace.COMMUNICATION)
class GathersTheLastUnitFirst(FullyShardEngine):
    """The unit that forward needs last is gathered first."""

    class Prepared(PreparedFullyShard):
        def __call__(self, *inputs: Any, **named: Any) -> Any:  # Any: a model returns any type
            if self.plan.units:
                self.units()[self.plan.units[-1]].unshard()
            return super().__call__(*inputs, **named)


@mutant(after="deepspeedai/DeepSpeed#7804", trace=Trace.COMMUNICATION)
class ReducesInTheOrderOfForward(ReferenceEngine):
    """All reductions wait for the end of backward, and then come in the order of forward."""

    class Prepared(PreparedReference):
        """Has every group hold its gradients through backward, and reduces them all afterwards."""

        def backward(self, loss: torch.Tensor) -> None:
            groups = [
                group
                for name in (*self.plan.units, "")
                if (unit := state_of(self.module.get_submodule(name.split(",")[0]))) is not None
                for group in unit.param_groups
            ]
            held = [group for group in groups if group.reduces]
            for group in held:
                group.reduces = False
            super().backward(loss)
            for group in held:
                group.reduces = True
                group.reduce_gradients()
                group.comm_ctx.finish()


@mutant(after="pytorch/pytorch#118118", phase="gather")
class KeepsMistakenPrefetches(FullyShardEngine):
    """Units that backward prefetched stay gathered, and are stale in the next step."""

    class Prepared(PreparedFullyShard):
        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss)
            prefetch = self.plan.prefetch or Prefetch()
            for target in {target for _, targets in prefetch.backward for target in targets}:
                self.units()[target].unshard()


class _HastyAllGather(DefaultAllGather):
    """Starts a gather and reports its output as ready."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        super().__call__(*args, **{**kwargs, "async_op": True})


@mutant(after="NVIDIA/Megatron-LM#663", phase="gather")
class ReadsTheGatherTooEarly(ReferenceEngine):
    """The output of a gather is read before it has arrived."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then gather without waiting."""
        prepared = super().prepare(model, plan, mesh)
        for module in prepared.module.modules():
            if isinstance(module, reference.FSDPModule):
                module.set_custom_all_gather(_HastyAllGather())
        return prepared


@mutant(after="deepspeedai/DeepSpeed#7804", trace=Trace.COMMUNICATION)
class GathersSynchronously(FullyShardEngine):
    """Gathers block although they should be asynchronous."""

    misreads = undemanding(Capability.ASYNC_GATHER)


@mutant(after="pytorch/pytorch#105635", trace=Trace.COMMUNICATION)
class GathersWhatBackwardHasDone(ReferenceWrapperEngine):
    """A late prefetch gathers the previous unit in forward's order, though its backward may be over."""

    spoil = in_each(reference_units, "_prefetch_next", lambda state: partial(_prefetch_predecessor, state))


def _unless_joint(state: FSDPState) -> Callable[[RootState[FSDPState]], None]:
    honest = state._prefetch_in_backward
    return honest if len(state.modules) == 1 else lambda _: None


@mutant(after="NVIDIA/Megatron-LM#5513", trace=Trace.COMMUNICATION)
class JointUnitsPrefetchNothing(ReferenceEngine):
    """In backward a unit of several modules starts no gather of the next one, which then waits for its reduction."""

    spoil = in_each(reference_units, "_prefetch_in_backward", _unless_joint)


def _counting_on(state: FSDPState) -> Callable[..., None]:
    honest = state.finish_backward

    def finish(*, frees: bool, is_last: bool) -> None:
        num_done = state.num_backwards
        honest(frees=frees, is_last=is_last)
        if not is_last:
            state.num_backwards = num_done

    return finish


@mutant(after="pytorch/pytorch#118118", trace=Trace.COMMUNICATION)
class PrefetchesInTheFirstBackwardAlone(ReferenceEngine):
    """A unit whose backward ran once is not gathered ahead when another backward goes through the same graph."""

    spoil = in_each(reference_units, "finish_backward", _counting_on)


@mutant(after="Robbyant/lingbot-vla#50", trace=Trace.STATE)
class FreesJointUnitsByModule(ReferenceEngine):
    """A further backward through a graph frees a unit of several modules after each, and gathers it for the next."""

    def adopt(self, module: nn.Module, model: nn.Module, plan: Plan) -> PreparedModel:
        """Free at the end of each call's further backwards."""
        prepared = super().adopt(module, model, plan)
        for state in reference_units(prepared):
            state._calls._on_end = _freeing_by_module(state)
        return prepared


def _freeing_by_module(state: FSDPState) -> Callable[[WatchedForward], None]:
    honest = state._inputs_done

    def ended(forward: WatchedForward) -> None:
        honest(forward)
        if forward.num_ended > forward.num_calls:
            state._free_after_backward()

    return ended


def _holding_incomplete(state: FSDPState) -> Callable[[Iterable[FSDPParamGroup]], None]:
    honest = state._reduce

    def reduce(groups: Iterable[FSDPParamGroup]) -> None:
        is_over = groups is state.param_groups
        honest(g for g in groups if is_over or len(state.modules) == 1 or not g.awaits_gradients)

    return reduce


@mutant(after="ISEEKYAN/Megatron-LM#158", trace=Trace.COMMUNICATION)
class ReducesIncompleteJointUnitsLast(ReferenceEngine):
    """A unit of several modules, some of whose parameters go unused, is reduced when all of backward is over."""

    spoil = in_each(reference_units, "_reduce", _holding_incomplete)


def _prefetch_predecessor(state: FSDPState, root_state: RootState[FSDPState]) -> None:
    order, position = root_state._left_forward, state._backward_position
    predecessor = order[position - 1] if 0 < position < len(order) else None
    if predecessor is not None:
        predecessor.prefetch_in_backward()


class _PreparedStaleReference(Stale, PreparedReference):
    pass


@mutant(after="NVIDIA/Megatron-LM#663", phase="gather")
class IgnoresTheStepEvent(ReferenceEngine):
    """If an event follows the optimizer step, forward uses the parameters from before it."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Lag one step behind if the plan demands an event."""
        return _behind(super().prepare(model, plan, mesh), is_behind=Capability.STEP_EVENT in plan.demands)


@mutant(after="NVIDIA/Megatron-LM#4609", phase="gather")
class PrefetchesStaleParameters(ReferenceEngine):
    """With prefetch lists, forward uses the parameters of the previous step."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Lag one step behind if the plan has such lists."""
        return _behind(super().prepare(model, plan, mesh), is_behind=plan.prefetch is not None)


def _behind(prepared: PreparedModel, *, is_behind: bool) -> PreparedModel:
    assert isinstance(prepared, PreparedReference)
    if not is_behind:
        return prepared
    return _PreparedStaleReference(prepared.module, prepared.plan, prepared.api)


# Any, throughout: FSDP2's private classes and the streams of a device have no public types.


@mutant(after="deepspeedai/DeepSpeed#1069", trace=Trace.COMMUNICATION)
class WaitsWhereItGathers(ReferenceEngine):
    """A prefetched gather is waited for in the call that issues it."""

    spoil = in_each(reference_groups, "unshard", lambda group: _both(group.unshard, group.wait))


@mutant(after="deepspeedai/DeepSpeed#7804", trace=Trace.COMMUNICATION)
class WaitsWhereItReduces(ReferenceEngine):
    """A reduction is waited for in the call that issues it."""

    spoil = in_each(
        reference_groups, "reduce_gradients", lambda group: _both(group.reduce_gradients, _finisher(group))
    )


@mutant(after="pytorch/pytorch#106030", trace=Trace.COMMUNICATION)
class PrefetchesAfterItsTurn(ReferenceEngine):
    """Backward gathers the next unit after the current one was computed, not before."""

    spoil = in_each(reference_units, "prefetches_in_backward", lambda _: BackwardPrefetchTime.LAST)


@mutant(after="NVIDIA/Megatron-LM#6153", trace=Trace.COMMUNICATION)
class GathersEverythingFirst(FullyShardEngine):
    """All units are gathered when forward begins."""

    class Prepared(PreparedFullyShard):
        def __call__(self, *inputs: Any, **named: Any) -> Any:  # Any: a model returns any type
            for unit in ("", *self.plan.units):
                self.units()[unit].unshard()
            return super().__call__(*inputs, **named)


@mutant(after="pytorch/pytorch#118118", trace=Trace.STATE)
class FreesUnitsTogether(FullyShardEngine):
    """All units are freed after forward, not each after its own."""

    class Prepared(PreparedFullyShard):
        def __init__(self, module: nn.Module, plan: Plan) -> None:
            super().__init__(module, plan)
            self._is_late = plan.reshard is Reshard.AFTER_FORWARD
            for unit in self.units().values() if self._is_late else ():
                unit.set_reshard_after_forward(is_on=False)

        def __call__(self, *inputs: Any, **named: Any) -> Any:  # Any: as above
            output = super().__call__(*inputs, **named)
            for unit in self.units().values() if self._is_late else ():
                unit.reshard()
            return output


def _both(first: Callable[[], None], then: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        first()
        then()

    return call


def _finisher(group: Any) -> Callable[[], None]:
    def finish() -> None:
        group.comm_ctx.finish()  # looked up late: a context is shared once the root has run

    return finish


@mutant(after="pytorch/pytorch#118118", trace=Trace.COMMUNICATION)
class GathersMistakenPrefetchesAgain(ReferenceEngine):
    """Units that one backward gathered for the next are gathered again in the next."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then free units that are being gathered at the end of every backward."""
        prepared = super().prepare(model, plan, mesh)
        for unit in reference_units(prepared):
            after(unit, "finish_backward", _drop_gathers)
        return prepared


@mutant(after="pytorch/pytorch#137348", phase="gather")
class TakesUnusedPrefetchesAsCurrent(FullyShardEngine):
    """Units that the last backward gathered and did not use are stale in the next step."""

    spoil = in_each(
        groups, "finalize_backward", lambda group: _keeping_gather(group, group.finalize_backward)
    )


def _drop_gathers(unit: FSDPState) -> None:
    if any(group.state is ShardedState.GATHERING for group in unit.param_groups):
        unit.reshard()


# Any: FSDP2's private classes have no public types.
def _keeping_gather(group: Any, finalize: Callable[[], None]) -> Callable[[], None]:
    def finalize_and_keep() -> None:
        gathered = group._all_gather_result
        finalize()
        group._all_gather_result = gathered

    return finalize_and_keep
