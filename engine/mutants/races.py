"""Mutants whose streams do not wait, or whose buffers are freed too early: of FSDP2, DDP and the reference engine.

They are right on a CPU, where operators run one by one, and by chance elsewhere. Changes affect one prepared model:
streams and groups of its own, never objects that other engines in the process share.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.reference import ReferenceEngine, ReferenceOnStreams
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine
from shardproof.engine.contract import Plan, PreparedModel
from shardproof.engine.mutants.fsdp2_insides import (
    after_method,
    comm_contexts_of,
    deaf,
    deaf_in,
    forget_reduce_inputs,
    ignore,
    in_context,
    reference_groups,
)
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import Spoil, in_each
from shardproof.engine.reference.comm_context import CommContext, PendingCollective, Reduction
from shardproof.engine.reference.param_group import FSDPParamGroup

# Any, throughout: FSDP2's private classes and the streams of a device have no public types.


@mutant(after="deepspeedai/DeepSpeed#8061", trace=Trace.RACES)
class GathersBeforeTheCopyIn(FullyShardEngine):
    """The stream that gathers does not wait for the one that fills its input."""

    spoil = in_context(deaf_in("all_gather_stream", "foreach_all_gather"))


@mutant(after="deepspeedai/DeepSpeed#7898", trace=Trace.RACES)
class ReducesBeforeGradientsAreThere(FullyShardEngine):
    """The stream that reduces does not wait for that of backward."""

    spoil = in_context(deaf("reduce_scatter_stream"))


@mutant(after="deepspeedai/DeepSpeed#7371", trace=Trace.RACES)
class FreesTheReduceInput(FullyShardEngine):
    """The input of a reduction is freed as soon as it was issued."""

    spoil = after_method("post_backward", forget_reduce_inputs)


@mutant(after="flagos-ai/Torch-FL#62", trace=Trace.RACES)
class DividesBeforeTheReduction(DistributedDataParallelEngine):
    """A communication hook of DDP divides a buffer to which its reduction may still write."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        ddp: Any = prepared.module  # DDP, which the contract does not name
        # DDP checks annotations, and accepts only its own.
        ddp.register_comm_hook(mesh.get_group(), lambda group, bucket: _hasty(group, bucket))
        return prepared


# Any: buckets have no public type.
def _hasty(group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    gradients: torch.Tensor = bucket.buffer()
    work = dist.all_reduce(gradients, group=group, async_op=True)
    assert work is not None
    gradients.div_(group.size())
    done: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda _: gradients)
    return done


@mutant(after="deepspeedai/DeepSpeed#7898", trace=Trace.RACES)
class ReducesBeforeTheCut(ReferenceEngine):
    """The reference engine reduces gradients without waiting for their layout."""

    spoil = in_each(
        lambda prepared: [c._scatter_stream for c in comm_contexts_of(prepared)],
        "wait_stream",
        lambda _: ignore,
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
        comm_ctx.order_all_gathers = ignore
        try:
            wait()
        finally:
            del comm_ctx.order_all_gathers  # the class's own again

    return hasty


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
