"""Mutants of FSDP1 that each leave out one wait. What is changed belongs to one prepared model."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel

from engine.adapters.torch_fsdp1 import FullyShardedDataParallelEngine
from engine.contract import Plan, PreparedModel

__all__ = [
    "ComputesBackwardDuringTheGather",
    "ComputesForwardDuringTheGather",
    "GathersFlatParametersDuringTheStep",
    "ReducesFlatGradientsInTheMaking",
    "StepsOnFlatGradientsInTheMaking",
]

# Any, throughout: FSDP1's insides and the streams of a device have no public types.


class ComputesForwardDuringTheGather(FullyShardedDataParallelEngine):
    """Forward does not wait for the gather of the unit's parameters.

    After NVIDIA/Megatron-LM#663: with gathers overlapped, forward read parameters that had not arrived.
    """

    name = "mutant.ComputesForwardDuringTheGather"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap honestly, then have the current stream not wait there."""
        return _deaf_currently(super().prepare(model, plan, mesh), "_pre_forward_unshard")


class ComputesBackwardDuringTheGather(FullyShardedDataParallelEngine):
    """Backward does not wait for the gather of the unit's parameters.

    After NVIDIA/Megatron-LM#663: with gathers overlapped, forward read parameters that had not arrived.
    """

    name = "mutant.ComputesBackwardDuringTheGather"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap honestly, then have the current stream not wait there."""
        return _deaf_currently(super().prepare(model, plan, mesh), "_pre_backward_hook")


class GathersFlatParametersDuringTheStep(FullyShardedDataParallelEngine):
    """The gathers of an iteration do not wait for the optimizer.

    After NVIDIA/Megatron-LM#4609: gathers that overlapped the step shared a buffer with what it was reading.
    """

    name = "mutant.GathersFlatParametersDuringTheStep"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap honestly, then have the stream of gathers wait for no other stream."""
        return _deaf(super().prepare(model, plan, mesh), _UNSHARD)


class ReducesFlatGradientsInTheMaking(FullyShardedDataParallelEngine):
    """The stream that reduces does not wait for the one on which backward computes.

    After deepspeedai/DeepSpeed#7898: the stream that reduced waited for another stream than that of backward.
    """

    name = "mutant.ReducesFlatGradientsInTheMaking"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap honestly, then have that stream wait for no other."""
        return _deaf(super().prepare(model, plan, mesh), _POST_BACKWARD)


class StepsOnFlatGradientsInTheMaking(FullyShardedDataParallelEngine):
    """Backward ends without a wait for the stream that reduces.

    After flagos-ai/Torch-FL#62: gradients were read while their reduction was under way on another stream.
    """

    name = "mutant.StepsOnFlatGradientsInTheMaking"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap honestly, then have the current stream not wait there."""
        return _deaf_currently(super().prepare(model, plan, mesh), "_post_backward_final_callback")


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
    """A handle of a device as FSDP1 holds one, which is asked for everything by name."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


class _DeafCurrentStream(_Handle):
    """Its current stream is deaf where one function of FSDP1 asks for it."""

    def __init__(self, handle: Any, function: str) -> None:
        super().__init__(handle)
        self._function = function

    def current_stream(self, *device: Any) -> Any:
        """Give it."""
        stream = self._handle.current_stream(*device)
        return _Deaf(stream) if sys._getframe(1).f_code.co_name == self._function else stream


class _DeafNewStream(_Handle):
    """The stream of one position among those that FSDP1 makes waits for no other."""

    def __init__(self, handle: Any, position: int) -> None:
        super().__init__(handle)
        self._position = position

    def Stream(self, **options: Any) -> Any:  # noqa: N802 - as a device has it
        """Make one."""
        stream = self._handle.Stream(**options)
        if self._position == 0:
            stream.wait_stream = _ignore
        self._position -= 1
        return stream


# The order in which a root makes its streams.
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
