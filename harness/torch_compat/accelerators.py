"""Devices through torch's generic interface: which are present, how a rank uses one, which backend moves its tensors.

The code depends on no vendor: it looks up a device's module, count and backend by the device's name. Two devices have
code elsewhere: the CPU, which is always present, and CUDA, which has torch's trace and graphs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from shardproof.harness.errors import UsageError
from shardproof.harness.torch_compat.dispatch import raw_access

# Backends that refuse two ranks on one device.
_ALONE = {"nccl"}


def accelerator() -> torch.device | None:
    """Return the kind of accelerator that this process finds, without an index."""
    return torch.accelerator.current_accelerator(check_available=True)


def num_devices(kind: str) -> int:
    """Return how many devices of a kind this machine has; 0 for a kind that this torch does not support."""
    module = _module(kind)
    return int(module.device_count()) if module is not None and module.is_available() else 0


def is_here(kind: str) -> bool:
    """Return whether ranks on this machine can use a device of this kind."""
    return kind == "cpu" or num_devices(kind) > 0


def require_device(kind: str, num_processes: int = 1) -> None:
    """Raise UsageError unless so many processes can use devices of this kind, with a backend for their tensors."""
    if not is_here(kind):
        found = torch.accelerator.current_accelerator()
        raise UsageError(
            f"the device {kind}",
            expected="a device that torch supports and finds here",
            got="an unknown one" if _module(kind) is None else "none of its kind on this machine",
            hint=f"processes:2:{found.type}"
            if found is not None
            else "processes:2, which needs no accelerator",
        )
    if kind != "cpu" and _backend(kind) in _ALONE and num_processes > num_devices(kind):
        raise UsageError(
            f"{num_processes} processes on the device {kind}",
            expected=f"a device for each, because {_backend(kind)} refuses two ranks on one",
            got=f"{num_devices(kind)} on this machine",
            hint=f"threads:{num_processes}:{kind}, whose ranks share a device",
        )


# Any: a vendor's module, which has no type.
def _module(kind: str) -> Any:
    try:
        return torch.get_device_module(kind)
    except RuntimeError:  # a name unknown to torch, or a device without a module
        return None


def _backend(kind: str) -> str:
    try:
        return dist.get_default_backend_for_device(kind)
    except ValueError as error:
        raise UsageError(
            f"the device {kind}",
            expected="a backend registered for it",
            got="none",
            hint=f"torch.distributed.Backend.register_backend(NAME, ..., devices=[{kind!r}]) in its package",
        ) from error


def backends_for(kind: str) -> str:
    """Return the backends of a world as torch names them by default: gloo for the CPU, and the device's own."""
    return "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{_backend(kind)}"


def device_of_rank(kind: str, local_rank: int) -> torch.device:
    """Return a rank's device; if a launcher shows each process only its own device, that is the first one."""
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, local_rank % (num_devices(kind) or 1))


def make_current(device: torch.device) -> None:
    """Make an accelerator the calling thread's current one, and let it compute float32 in full.

    cuDNN computes convolutions and recurrent cells in TF32 by default, which has ten bits of mantissa, and cuBLAS may
    add the parts of a product in its own few bits.
    """
    if device.type != "cpu":
        _module(device.type).set_device(device)
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


# The variables by which drivers are told what a process may see; "" is nothing.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES")


def hide_accelerators() -> None:
    """Hide all accelerators from this process, which has not used one: the CPU is then the same on every machine.

    Engines ask torch which accelerator is there, and take its streams, its pinned memory and its meshes for those of a
    model on the CPU.
    """
    found = torch.accelerator.current_accelerator()
    of_vendor = [] if found is None else [f"{found.type.upper()}_VISIBLE_DEVICES"]
    os.environ.update(dict.fromkeys((*_VISIBLE, *of_vendor), ""))


def use_only(kind: str) -> None:
    """Let a process that has used none compute on a kind of accelerator; on the CPU none is there."""
    if kind == "cpu":
        hide_accelerators()
    else:
        make_current(device_of_rank(kind, 0))


def own_stream(device: torch.device) -> None:
    """Select a device and a new stream of it on the calling thread: all threads share a device's default stream."""
    if device.type != "cpu":
        make_current(device)
        torch.accelerator.set_stream(torch.Stream(device))


# Torch's own: a watch replaces them for engines, and the transport's streams and events are none of an engine's.
_current_stream, _record_stream = torch.accelerator.current_stream, torch.Tensor.record_stream


def moment_of(device: torch.device) -> torch.Event | None:
    """Return an event after all work that the calling thread has issued to its current stream; None on a CPU."""
    if device.type == "cpu":
        return None
    with raw_access():
        return _current_stream(device).record_event()


def await_moment(device: torch.device, moment: torch.Event | None) -> None:
    """Let the calling thread's current stream wait for a `moment_of` another; the host does not wait."""
    if moment is not None:
        with raw_access():
            _current_stream(device).wait_event(moment)


def used_here(tensors: Iterable[torch.Tensor]) -> None:
    """Keep the memory of tensors until the current stream has used them, though they were made on another stream."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            _record_stream(tensor, _current_stream(tensor.device))


def seed_device(kind: str, seed: int) -> None:
    """Seed the generator of the current device, unless it is the CPU, whose generator is the default one.

    A generator whose use is being captured into a graph of CUDA takes no seed.
    """
    if kind != "cpu" and not (kind == "cuda" and torch.cuda.is_current_stream_capturing()):
        _module(kind).manual_seed(seed)
