"""Mutants of FSDP2 that each leave out one wait, or free one buffer too early.

They are right on a CPU, where operators run one by one, and by chance elsewhere. Changes affect one prepared model:
streams and groups of its own, never objects that other engines in the process share.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine
from shardproof.engine.contract import Capability, Plan, PreparedModel, Reshard
from shardproof.engine.mutants.fsdp2_insides import (
    after_method,
    before_method,
    deaf,
    deaf_in,
    forget_post_reduce_events,
    in_context,
    keep_reduce_inputs,
    reduce_inputs,
    waits_without_own_event,
)
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.plans import HYBRID_BLOCKS, ON_BLOCKS, SHARDED_BLOCKS

# Any, throughout: FSDP2's private classes and the streams of a device have no public types.

_BY_HAND = frozenset({Capability.UNIT_STATE, Capability.ASYNC_GATHER})
_NO_WORK = object()  # FSDP2 checks whether there is any work, and then whether it is a Work


def _lose_event(group: Any) -> None:
    if group._all_gather_result is not None:
        group._all_gather_result = group._all_gather_result._replace(all_gather_event=None)


def _lose_event_of_the_last(group: Any) -> None:
    last = group.comm_ctx.all_gather_state
    if last is not None and group._all_gather_result is not None:
        group.comm_ctx.all_gather_state = last._replace(event=None)


def _lose_work(group: Any) -> None:
    result = group._all_gather_result
    if result is not None and result.all_gather_work is not None:
        group._all_gather_result = result._replace(all_gather_work=_NO_WORK)


def _forget_events(group: Any) -> None:
    kept = reduce_inputs(group.comm_ctx)
    keep_reduce_inputs(group.comm_ctx, [state._replace(event=None) for state in kept])


@mutant(after="deepspeedai/DeepSpeed#8061", kills_on=ON_BLOCKS, trace=Trace.RACES)
class GathersBeforeTheCopyIn(FullyShardEngine):
    """The stream that gathers does not wait for the one that fills its input."""

    spoil = in_context(deaf_in("all_gather_stream", "wait_stream", "foreach_all_gather"))


@mutant(after="NVIDIA/Megatron-LM#663", kills_on=ON_BLOCKS, trace=Trace.RACES)
class CopiesOutDuringTheGather(FullyShardEngine):
    """Whole parameters are copied out of a gather that may be in flight."""

    spoil = after_method("unshard", _lose_event)


@mutant(after="deepspeedai/DeepSpeed#7898", kills_on=ON_BLOCKS, trace=Trace.RACES)
class ReducesBeforeGradientsAreThere(FullyShardEngine):
    """The stream that reduces does not wait for that of backward."""

    spoil = in_context(deaf("reduce_scatter_stream"))


@mutant(
    after="flagos-ai/Torch-FL#62",
    microbatches=2,
    plan=SHARDED_BLOCKS,
    because="the input of a lone reduction is waited for, and nothing follows it on its stream",
    trace=Trace.RACES,
)
class EndsBackwardWithoutAWait(FullyShardEngine):
    """The optimizer does not wait for the work after the last reductions."""

    spoil = after_method("post_backward", forget_post_reduce_events)


@mutant(after="NVIDIA/Megatron-LM#4609", steps=2, plan=SHARDED_BLOCKS, trace=Trace.RACES)
class GathersDuringTheStep(FullyShardEngine):
    """The first copy of an iteration does not wait for the optimizer."""

    spoil = in_context(deaf_in("all_gather_copy_in_stream", "wait_stream", "_root_pre_forward"))


@mutant(
    after="deepspeedai/DeepSpeed#7188",
    plan=SHARDED_BLOCKS,
    because="a single unit has no next one",
    trace=Trace.RACES,
)
class ReusesTheReduceInput(FullyShardEngine):
    """The input of a reduction is freed without a wait when the next one begins."""

    spoil = after_method("post_backward", _forget_events)


@mutant(
    after="deepspeedai/DeepSpeed#7371",
    plan=SHARDED_BLOCKS,
    because="nothing is computed after the reduction of a single unit",
    trace=Trace.RACES,
)
class FreesTheReduceInput(FullyShardEngine):
    """The input of a reduction is freed as soon as it was issued."""

    spoil = after_method("post_backward", lambda group: keep_reduce_inputs(group.comm_ctx, []))


@mutant(after="NVIDIA/Megatron-LM#5788", kills_on=ON_BLOCKS, trace=Trace.RACES)
class FreesTheGatherOutput(FullyShardEngine):
    """The output of a gather is freed while it may be copied from."""

    spoil = before_method("wait_for_unshard", _lose_event_of_the_last)


@mutant(after="NVIDIA/Megatron-LM#3670", world_size=4, plan=HYBRID_BLOCKS, trace=Trace.RACES)
class ReducesReplicasBeforeTheScatter(FullyShardEngine):
    """Under a hybrid layout replicas do not wait for the reduction within each."""

    spoil = in_context(deaf("all_reduce_stream"))


@mutant(
    after="pytorch/pytorch#180665",
    world_size=4,
    plan=replace(HYBRID_BLOCKS, reduce_dtype=torch.bfloat16),
    because="without a dtype of its own it is the gradient, which stays",
    trace=Trace.RACES,
)
class FreesTheReplicasBuffer(FullyShardEngine):
    """The buffer of the reduction over replicas in another dtype is freed as soon as it was issued."""

    spoil = after_method("post_backward", lambda group: setattr(group, "_all_reduce_state", None))


@mutant(
    after="deepspeedai/DeepSpeed#8061",
    world_size=4,
    plan=replace(SHARDED_BLOCKS, reshard=Reshard.TO_PAIRS),
    because="other policies copy nothing",
    trace=Trace.RACES,
)
class GathersPartsBeforeTheyAreCut(FullyShardEngine):
    """Parts kept for pairs of ranks are gathered without waiting for their copy."""

    spoil = after_method("reshard", lambda group: setattr(group, "_reshard_after_forward_event", None))


@mutant(after="NVIDIA/Megatron-LM#5788", kills_on=ON_BLOCKS, trace=Trace.RACES)
class FreesTheGatherOutputInBackward(FullyShardEngine):
    """In backward the output of a gather is freed while it may be copied from."""

    spoil = waits_without_own_event


@mutant(after="NVIDIA/Megatron-LM#5788", kills_on=ON_BLOCKS, trace=Trace.RACES)
class FreesTheLastGatherOutput(FullyShardEngine):
    """At the end of forward the output of a gather is freed while it may be copied from."""

    spoil = in_context(deaf_in("all_gather_copy_in_stream", "wait_event", "_post_forward"))


@mutant(
    after="NVIDIA/Megatron-LM#4609",
    steps=2,
    plan=replace(SHARDED_BLOCKS, demands=frozenset({Capability.STEP_EVENT})),
    trace=Trace.RACES,
)
class GathersBeforeTheEventOfTheStep(FullyShardEngine):
    """The first copy of an iteration does not wait for the event recorded after the optimizer."""

    spoil = in_context(deaf_in("all_gather_copy_in_stream", "wait_event", "_root_pre_forward"))


@mutant(
    after="NVIDIA/Megatron-LM#663",
    plan=replace(SHARDED_BLOCKS, demands=_BY_HAND),
    because="other gathers are ordered by their streams",
    trace=Trace.RACES,
)
class ReadsAnAsyncGatherUnderWay(FullyShardEngine):
    """A gather that the caller issued ahead is copied out of without waiting for its work."""

    spoil = after_method("unshard", _lose_work)


@mutant(after="NVIDIA/Megatron-LM#3670", kills_on=ON_BLOCKS, trace=Trace.RACES)
class RunsTheHookDuringTheReduction(FullyShardEngine):
    """An all-reduce hook runs without waiting for the reduction whose output it receives."""

    deaf_where = "foreach_reduce"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, add a hook that changes nothing, then have its stream wait for no other."""
        prepared = super().prepare(model, plan, mesh)
        # FSDP2 itself frees a hook's input too early: that is not the fault of this mutant.
        kept: list[torch.Tensor] = []

        def touch(gradients: torch.Tensor) -> None:
            kept.append(gradients.mul_(1))

        modules: list[Any] = [m for m in prepared.module.modules() if hasattr(m, "set_all_reduce_hook")]
        for module in modules:
            module.set_all_reduce_hook(touch)
        after_method("finalize_backward", lambda _: kept.clear())(prepared)
        return in_context(deaf_in("all_reduce_stream", "wait_stream", self.deaf_where))(prepared)
