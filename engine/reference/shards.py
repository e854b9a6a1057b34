"""What a rank sends of its shards: all of a group's, side by side, each padded to the size of the largest."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.reference.parameter import ShardedParameter

__all__ = ["pack", "whereabouts"]


def pack(parameters: Sequence[ShardedParameter], out: torch.Tensor) -> None:
    """Copy the parameters' shards into ``out`` (1-D), cast to its dtype; as they are, byte for byte, if it is bytes.

    ``out`` is this rank's part of the gather's output, so that the gather needs no input of its own.
    """
    locals_ = [p.local for p in parameters]
    as_bytes = out.dtype == torch.uint8
    if not as_bytes and all(
        p.geometry.is_even and local.device == out.device
        for p, local in zip(parameters, locals_, strict=True)
    ):
        torch.cat([local.reshape(-1) for local in locals_], out=out)
        return
    start = 0
    for parameter, local in zip(parameters, locals_, strict=True):
        flat = local.reshape(-1).view(torch.uint8) if as_bytes else local.reshape(-1)
        width = local.element_size() if as_bytes else 1
        end = start + parameter.geometry.padded_numel * width
        out[start : start + flat.numel()].copy_(flat, non_blocking=True)
        out[start + flat.numel() : end].zero_()
        start = end


def whereabouts(parameters: Sequence[ShardedParameter]) -> tuple[object, ...]:
    """Describe where the shards are and in which dtype, to tell when they were moved or cast."""
    return tuple((p.local.dtype, p.local.device, p.local.data_ptr()) for p in parameters)
