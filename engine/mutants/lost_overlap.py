"""Mutants with right numbers and collectives, but without overlap with computation, or without prefetching."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from shardproof.engine.adapters.reference import ReferenceEngine
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from shardproof.engine.contract import Plan, Reshard
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import in_each
from shardproof.engine.mutants.plans import Lists, changing_lists
from shardproof.engine.mutants.reference_insides import reference_groups, reference_units
from shardproof.engine.reference.fsdp_state import BackwardPrefetchTime

# Any, throughout: FSDP2's private classes and the streams of a device have no public types.


def _later(lists: Lists, order: tuple[str, ...]) -> Lists:
    def moved(targets: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(order[i + 1] for i in map(order.index, targets) if i + 1 < len(order))

    return tuple((unit, moved(targets) or (unit,)) for unit, targets in lists)


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


@mutant(after="deepspeedai/DeepSpeed#1069", trace=Trace.COMMUNICATION)
class PrefetchesTheUnitAfterNext(FullyShardEngine):
    """The unit after the one in the list is prefetched instead."""

    misreads = changing_lists(_later)


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
