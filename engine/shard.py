"""One rank's piece of a tensor and where it lies in the whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement

__all__ = ["Shard", "shard_of"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """A local tensor, the index of its first element in the global tensor, and the global shape.

    ``offsets`` and ``global_shape`` have one entry per dim. A whole tensor has offsets of zero and its
    own shape; a rank that owns nothing of a tensor has a local tensor with a dim of size 0.
    """

    tensor: torch.Tensor
    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all of the tensor."""
        return tuple(self.tensor.shape) == self.global_shape

    @property
    def region(self) -> tuple[slice, ...]:
        """The slices of the global tensor that this shard covers."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.tensor.shape, strict=True))


def shard_of(tensor: torch.Tensor) -> Shard:
    """Describe a plain tensor or DTensor as this rank's shard, without communication.

    The local tensor is detached, copied to the CPU, and cloned: later updates do not change it.
    Uneven dims follow DTensor's rule, that of ``torch.chunk``: all chunks but the last ones have
    ceil(n / ranks) rows. Raises TypeError for placements other than Shard and Replicate.
    """
    detached = tensor.detach()
    if not isinstance(detached, DTensor):
        return Shard(
            tensor=detached.to("cpu", copy=True),
            offsets=(0,) * detached.dim(),
            global_shape=tuple(detached.shape),
        )
    return Shard(
        tensor=detached.to_local().to("cpu", copy=True),
        offsets=_offsets(detached),
        global_shape=tuple(detached.shape),
    )


def _offsets(tensor: DTensor) -> tuple[int, ...]:
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("shard_of: expected a rank that is part of the tensor's mesh, got one outside it")
    offsets = [0] * tensor.dim()
    sizes = list(tensor.shape)
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        if type(placement) is not ShardPlacement:
            raise TypeError(
                f"shard_of: expected Shard or Replicate placements, got {placement}; "
                "override the local_* reads of PreparedModel for this engine"
            )
        dim = placement.dim
        chunk = -(-sizes[dim] // tensor.device_mesh.size(axis))
        start = min(coordinate[axis] * chunk, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(chunk, sizes[dim] - start)
    return tuple(offsets)
