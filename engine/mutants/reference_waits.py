"""More mutants of the reference engine that each leave out one wait; the first ones are in `reference_races`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from shardproof.engine.adapters.reference import ReferenceEngine, ReferenceOnStreams
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import Spoil, in_each
from shardproof.engine.mutants.reference_insides import comm_contexts_of, reference_groups
from shardproof.engine.reference.comm_context import CommContext, PendingCollective, Reduction


def _gathers_freely_after(function: str) -> Spoil:
    """Let gathers skip the wait for the current stream that this function of the engine makes."""
    return in_each(comm_contexts_of, "order_all_gathers", lambda c: _deaf_in(function, c.order_all_gathers))


def _takes_as_done(position: int) -> Spoil:
    """Skip the wait for the collective at this position of each reduction."""
    return in_each(comm_contexts_of, "reduce", lambda comm_ctx: _reducing(comm_ctx, position))


def _unawaited(group: Any) -> Callable[[], torch.Tensor]:
    def gathered() -> torch.Tensor:
        gather, group._pending_gather = group._pending_gather, None
        output: torch.Tensor = gather.output
        return output

    return gathered


def _forgetting(comm_ctx: CommContext) -> Callable[[], None]:
    reserve = comm_ctx.reserve

    def hasty() -> None:
        comm_ctx._outputs.clear()
        reserve()

    return hasty


@mutant(after="NVIDIA/Megatron-LM#663", trace=Trace.RACES)
class ReadsGathersUnderWay(ReferenceEngine):
    """The reference engine takes gathers as done without waiting for their work."""

    spoil = in_each(reference_groups, "_wait_for_all_gather", _unawaited)


@mutant(after="deepspeedai/DeepSpeed#8061", trace=Trace.RACES)
class SendsPartsBeforeTheyAreCut(ReferenceEngine):
    """The reference engine gathers parts kept for pairs of ranks without waiting for their cut."""

    spoil = _gathers_freely_after("reshard_after_forward")


@mutant(after="NVIDIA/Megatron-LM#4609", trace=Trace.RACES)
class GathersByHandBeforeTheWrite(ReferenceEngine):
    """The reference engine runs the caller's gathers without waiting for writes to shards."""

    spoil = _gathers_freely_after("unshard")


@mutant(after="flagos-ai/Torch-FL#62", trace=Trace.RACES)
class TakesReductionsAsDone(ReferenceEngine):
    """The reference engine uses reduced gradients without waiting for the reduce-scatter."""

    spoil = _takes_as_done(0)


@mutant(after="NVIDIA/Megatron-LM#3670", trace=Trace.RACES)
class TakesTheSumOverReplicasAsDone(ReferenceEngine):
    """The reference engine uses gradients of replicas without waiting for the all-reduce."""

    spoil = _takes_as_done(1)


@mutant(after="pytorch/pytorch#180665", trace=Trace.RACES)
class FreesReducedOutputs(ReferenceOnStreams):
    """The reference engine frees a reduction's output while another stream may read it."""

    spoil = in_each(comm_contexts_of, "reserve", _forgetting)


class _Done:
    """Replaces a work: its wait does nothing."""

    def wait(self) -> bool:
        return True


def _deaf_in(function: str, order_all_gathers: Callable[..., None]) -> Callable[..., None]:
    def sometimes(*event: Any) -> None:
        if sys._getframe(1).f_code.co_name != function:
            order_all_gathers(*event)

    return sometimes


def _reducing(comm_ctx: CommContext, position: int) -> Callable[[torch.Tensor, Reduction], None]:
    reduce = comm_ctx.reduce

    def hasty(flat: torch.Tensor, reduction: Reduction) -> None:
        reduce(flat, _without_wait(reduction, position))

    return hasty


def _without_wait(reduction: Reduction, position: int) -> Reduction:
    done: Any = _Done()
    for index, in_flight in enumerate(reduction):
        yield PendingCollective(done, in_flight.output) if index == position else in_flight
