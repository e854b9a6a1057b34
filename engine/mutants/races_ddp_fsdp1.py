"""Mutants of FSDP1 and DDP that each leave out one wait. Changes affect one prepared model."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel

from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine
from shardproof.engine.adapters.torch_fsdp1 import FullyShardedDataParallelEngine
from shardproof.engine.contract import Layout, Plan, PreparedModel
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.plans import ON_BLOCKS, SHARDED_BLOCKS

# Any, throughout: FSDP1's private classes and the streams of a device have no public types.


class _Deaf:
    """A stream that waits for nothing."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def wait_stream(self, _: Any) -> None:
        """Go on."""

    wait_event = wait_stream


class _Handle:
    """FSDP1's handle of a device, whose attributes are looked up by name."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


class _DeafCurrentStream(_Handle):
    """Its current stream is deaf if one function of FSDP1 looks it up."""

    def __init__(self, handle: Any, function: str) -> None:
        super().__init__(handle)
        self._function = function

    def current_stream(self, *device: Any) -> Any:
        stream = self._handle.current_stream(*device)
        return _Deaf(stream) if sys._getframe(1).f_code.co_name == self._function else stream


class _DeafNewStream(_Handle):
    """The stream at one position among those that FSDP1 creates waits for no other."""

    def __init__(self, handle: Any, position: int) -> None:
        super().__init__(handle)
        self._position = position

    def Stream(self, **options: Any) -> Any:  # noqa: N802 - the device's name for it
        stream = self._handle.Stream(**options)
        if self._position == 0:
            stream.wait_stream = _ignore
        self._position -= 1
        return stream


# The order in which a root creates its streams.
_UNSHARD, _POST_BACKWARD = 0, 1


def _deaf_currently(prepared: PreparedModel, function: str) -> PreparedModel:
    wrappers: list[Any] = FullyShardedDataParallel.fsdp_modules(prepared.module)
    for wrapper in wrappers:
        wrapper._device_handle = _DeafCurrentStream(wrapper._device_handle, function)
    return prepared


def _deaf(prepared: PreparedModel, position: int) -> PreparedModel:
    root: Any = prepared.module
    root._device_handle = _DeafNewStream(root._device_handle, position)
    return prepared


def _ignore(_: Any) -> None:
    return None


@mutant(after="NVIDIA/Megatron-LM#663", kills_on=ON_BLOCKS, trace=Trace.RACES)
class ComputesForwardDuringTheGather(FullyShardedDataParallelEngine):
    """FSDP1 computes a forward without waiting for the gather of its parameters."""

    spoil = partial(_deaf_currently, function="_pre_forward_unshard")


@mutant(after="NVIDIA/Megatron-LM#663", kills_on=ON_BLOCKS, trace=Trace.RACES)
class ComputesBackwardDuringTheGather(FullyShardedDataParallelEngine):
    """FSDP1 computes a backward without waiting for the gather of its parameters."""

    spoil = partial(_deaf_currently, function="_pre_backward_hook")


@mutant(after="NVIDIA/Megatron-LM#4609", steps=2, plan=SHARDED_BLOCKS, trace=Trace.RACES)
class GathersFlatParametersDuringTheStep(FullyShardedDataParallelEngine):
    """FSDP1 begins an iteration without waiting for the optimizer."""

    spoil = partial(_deaf, position=_UNSHARD)


@mutant(after="deepspeedai/DeepSpeed#7898", kills_on=ON_BLOCKS, trace=Trace.RACES)
class ReducesFlatGradientsInTheMaking(FullyShardedDataParallelEngine):
    """FSDP1 reduces gradients without waiting for the stream of backward."""

    spoil = partial(_deaf, position=_POST_BACKWARD)


@mutant(after="flagos-ai/Torch-FL#62", kills_on=ON_BLOCKS, trace=Trace.RACES)
class StepsOnFlatGradientsInTheMaking(FullyShardedDataParallelEngine):
    """FSDP1 ends backward without waiting for its reductions."""

    spoil = partial(_deaf_currently, function="_post_backward_final_callback")


@mutant(after="flagos-ai/Torch-FL#62", plan=Plan(layout=Layout.REPLICATE), trace=Trace.RACES)
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
