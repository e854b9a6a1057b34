"""Devices as torch knows them: which are here, how a rank takes one, and which backend carries its tensors.

No maker is named: what torch registers for a device - a module, a count, a backend - is asked for by its name. Two
devices are special elsewhere: the CPU, which is always there, and CUDA, where torch's trace and graphs exist.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardproof.harness.errors import UsageError

__all__ = [
    "backends_for",
    "device_of_rank",
    "is_here",
    "make_current",
    "num_devices",
    "require_device",
    "seed_device",
]


def num_devices(kind: str) -> int:
    """Return how many devices of a kind this machine has; 0 for a kind that this torch does not know."""
    module = _module(kind)
    return int(module.device_count()) if module is not None and module.is_available() else 0


def is_here(kind: str) -> bool:
    """Return whether ranks of this machine can be on a device of this kind."""
    return kind == "cpu" or num_devices(kind) > 0


def require_device(kind: str) -> None:
    """Raise UsageError unless ranks can be on a device of this kind, with a backend for its tensors."""
    if not is_here(kind):
        found = torch.accelerator.current_accelerator()
        raise UsageError(
            f"the device {kind}",
            expected="a device that torch knows and finds here",
            got="an unknown one" if _module(kind) is None else "none of its kind on this machine",
            hint=f"processes:2:{found.type}"
            if found is not None
            else "processes:2, which needs no accelerator",
        )
    if kind != "cpu":
        _backend(kind)


# Any: a maker's module, which has no type.
def _module(kind: str) -> Any:
    try:
        return torch.get_device_module(kind)
    except RuntimeError:  # a name that torch does not know, or a device without a module
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
    """Name the backends of a world as torch does by itself: gloo for the CPU, and the device's own."""
    return "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{_backend(kind)}"


def device_of_rank(kind: str, local_rank: int) -> torch.device:
    """Return a rank's device; a launcher may show each process its own device alone, which is the first then."""
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, local_rank % (num_devices(kind) or 1))


def make_current(device: torch.device) -> None:
    """Make an accelerator the process's current one."""
    if device.type != "cpu":
        _module(device.type).set_device(device)


def seed_device(kind: str, seed: int) -> None:
    """Seed the generator of the current device, unless that is the CPU, whose generator is the default one."""
    if kind != "cpu":
        _module(kind).manual_seed(seed)
