"""Mutants that use the buffers of a collective, or continue without its result, while it is in flight."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from shardproof.engine import reference
from shardproof.engine.adapters.reference import ReferenceEngine
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine
from shardproof.engine.contract import Plan, PreparedModel
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.reference.collectives import DefaultAllGather, DefaultReduceScatter


class _HarmsItsInput(DefaultReduceScatter):
    """Clears or frees the input as soon as the reduction is issued."""

    def __init__(self, harm: Callable[[torch.Tensor], object]) -> None:
        self._harm = harm

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any
    ) -> dist.Work | None:
        work = super().__call__(output_tensor, input_tensor, *args, **kwargs)
        self._harm(input_tensor)
        return work


class _Fills(DefaultAllGather):
    """Clears a row of the output while the gather of all rows is in flight."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        work = super().__call__(output_tensor, input_tensor, group, async_op)
        num_ranks = dist.get_world_size(group)
        output_tensor.view(num_ranks, -1)[(dist.get_rank(group) + 1) % num_ranks].zero_()
        return work


def _free(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


# Any: a module with methods of the reference engine; arguments and results of a hook.
def _each(prepared: PreparedModel, change: Callable[[Any], None]) -> PreparedModel:
    for module in prepared.module.modules():
        if isinstance(module, reference.FSDPModule):
            change(module)
    return prepared


def _hooked(
    prepared: PreparedModel, hook: Callable[[dist.ProcessGroup, Any], Future[torch.Tensor]]
) -> PreparedModel:
    ddp = prepared.module
    assert isinstance(ddp, DistributedDataParallel)
    # DDP checks annotations, and accepts no strings.
    ddp.register_comm_hook(ddp.process_group, lambda group, bucket: hook(group, bucket))
    return prepared


def _reduced(group: dist.ProcessGroup, bucket: Any) -> Future[Any]:
    """Reduce as DDP does without a hook."""
    gradients = bucket.buffer().div_(dist.get_world_size(group))
    work = dist.all_reduce(gradients, group=group, async_op=True)
    assert work is not None
    future: Future[Any] = work.get_future()
    return future


def _read_too_early(group: dist.ProcessGroup, bucket: Any) -> Future[torch.Tensor]:
    future = _reduced(group, bucket)
    early = bucket.buffer().clone()
    return future.then(lambda _: early)


def _forget_the_norm(group: dist.ProcessGroup, bucket: Any) -> Future[torch.Tensor]:
    future = _reduced_alone(group, bucket)
    norm = torch.linalg.vector_norm(bucket.parameters()[0].detach())
    dist.all_reduce(norm, group=group, async_op=True)
    return future


def _reduced_alone(group: dist.ProcessGroup, bucket: Any) -> Future[torch.Tensor]:
    return _reduced(group, bucket).then(lambda done: done.value()[0])


def _collect(group: dist.ProcessGroup, bucket: Any) -> Future[torch.Tensor]:
    gradients = _reduced(group, bucket).wait()[0]
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    pieces = gradients[: gradients.numel() // num_ranks * num_ranks].view(num_ranks, -1)
    dist.barrier(group)
    if rank:
        dist.send(pieces[rank], group=group, group_dst=0)
    else:
        for piece in pieces[1:]:
            dist.recv(piece, group=group)
    dist.broadcast(gradients, group=group, group_src=0)
    done: Future[torch.Tensor] = Future()
    done.set_result(gradients)
    return done


@mutant(after="deepspeedai/DeepSpeed#7188", trace=Trace.COMMUNICATION)
class ClearsTheReduceInput(ReferenceEngine):
    """The input of a reduction is cleared while the reduction is in flight."""

    spoil = partial(_each, change=lambda m: m.set_custom_reduce_scatter(_HarmsItsInput(torch.Tensor.zero_)))


@mutant(after="NVIDIA/Megatron-LM#5788", trace=Trace.COMMUNICATION)
class FreesTheInputOfAReduction(ReferenceEngine):
    """The input of a reduction is freed while the reduction is in flight."""

    spoil = partial(_each, change=lambda m: m.set_custom_reduce_scatter(_HarmsItsInput(_free)))


@mutant(after="NVIDIA/Megatron-LM#4609", trace=Trace.COMMUNICATION)
class FillsTheGatherOutput(ReferenceEngine):
    """The output of a gather is written to while the gather is in flight."""

    spoil = partial(_each, change=lambda module: module.set_custom_all_gather(_Fills()))


@mutant(after="flagos-ai/Torch-FL#62", phase="reduce")
class ReadsBucketsTooEarly(DistributedDataParallelEngine):
    """A hook reads its bucket before the future of the reduction is done."""

    spoil = partial(_hooked, hook=_read_too_early)


@mutant(after="pytorch/pytorch#64629", trace=Trace.COMMUNICATION)
class ForgetsTheWorkOfANorm(DistributedDataParallelEngine):
    """A hook starts a collective that is never waited for."""

    spoil = partial(_hooked, hook=_forget_the_norm)


@mutant(after="pytorch/pytorch#64629", phase="reduce")
class TrustsTheOrderOfArrival(DistributedDataParallelEngine):
    """Messages of several ranks are assumed to arrive in the order of ranks."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap honestly, then register the hook."""
        hooks = chain([_collect], repeat(_reduced_alone))
        return _hooked(super().prepare(model, plan, mesh), lambda group, bucket: next(hooks)(group, bucket))
