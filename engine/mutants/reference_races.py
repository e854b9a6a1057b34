"""Mutants of the reference engine whose streams do not wait, like those of FSDP2 in `races_fsdp2`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardproof.engine.adapters.reference import ReferenceEngine, ReferenceOnStreams
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import in_each
from shardproof.engine.mutants.reference_insides import comm_contexts_of, reference_groups
from shardproof.engine.reference.param_group import FSDPParamGroup


@mutant(after="deepspeedai/DeepSpeed#7898", trace=Trace.RACES)
class ReducesBeforeTheCut(ReferenceEngine):
    """The reference engine reduces gradients without waiting for their layout."""

    spoil = in_each(
        lambda prepared: [c._scatter_stream for c in comm_contexts_of(prepared)],
        "wait_stream",
        lambda _: _ignore,
    )


@mutant(after="NVIDIA/Megatron-LM#663", trace=Trace.RACES)
class GathersWhileTheStepWrites(ReferenceEngine):
    """The reference engine begins an iteration without waiting for the optimizer."""

    spoil = in_each(comm_contexts_of, "order_all_gathers", lambda c: _unless_given(c.order_all_gathers))


@mutant(after="NVIDIA/Megatron-LM#5788", trace=Trace.RACES)
class FreesTheCopiedBuffer(ReferenceEngine):
    """The reference engine frees a gather's buffer without waiting for the copy out of it."""

    spoil = in_each(reference_groups, "wait", lambda group: _without_a_wait_after(group, group.wait))


@mutant(after="deepspeedai/DeepSpeed#7188", trace=Trace.RACES)
class RefillsTheReduceInput(ReferenceOnStreams):
    """The reference engine frees a reduction's input without a wait."""

    spoil = in_each(comm_contexts_of, "reserve", lambda comm_ctx: comm_ctx._inputs.clear)


def _unless_given(order_all_gathers: Callable[..., None]) -> Callable[..., None]:
    """Ignore the calls that name an event, or None: those at the start of an iteration."""

    def sometimes(*event: Any) -> None:
        if not event:
            order_all_gathers()

    return sometimes


def _without_a_wait_after(group: FSDPParamGroup, wait: Callable[[], None]) -> Callable[[], None]:
    def hasty() -> None:
        comm_ctx: Any = group.comm_ctx
        comm_ctx.order_all_gathers = _ignore
        try:
            wait()
        finally:
            del comm_ctx.order_all_gathers  # the class's own again

    return hasty


def _ignore(*_: Any) -> None:
    return None
