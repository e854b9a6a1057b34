"""One rank's piece of a tensor and its position in the whole tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from types import EllipsisType

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import Shard as ShardPlacement


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shard:
    """A local tensor, the index of its first element in the global tensor, and the global shape.

    A piece is a block with one offset per dim, or it is flat: a 1-D interval of the flattened tensor with one
    offset, its start (``Shard.flat`` makes one). A whole tensor has zero offsets and its own shape. A rank that
    owns no part of a tensor has a local tensor with a dim of size 0.
    """

    tensor: torch.Tensor
    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]
    is_flat: bool = False

    @classmethod
    def flat(cls, tensor: torch.Tensor, start: int, global_shape: tuple[int, ...]) -> Shard:
        """Describe the elements of the flattened tensor from ``start`` on."""
        return cls(tensor=tensor, offsets=(start,), global_shape=global_shape, is_flat=True)

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all of the tensor."""
        return tuple(self.tensor.shape) == self._holding_shape

    @property
    def is_inside(self) -> bool:
        """Whether the piece has the right number of dims and offsets, and lies within the whole."""
        shape, local = self._holding_shape, tuple(self.tensor.shape)
        if len(local) != len(shape) or len(self.offsets) != len(shape):
            return False
        spans = zip(self.offsets, local, shape, strict=True)
        return all(start >= 0 and start + size <= end for start, size, end in spans)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this piece's elements from the last dims of ``whole``, as a view if ``whole`` is contiguous."""
        spans = (slice(o, o + n) for o, n in zip(self.offsets, self.tensor.shape, strict=True))
        region: tuple[EllipsisType | slice, ...] = (..., *spans)
        if self.is_flat:
            leading = whole.shape[: whole.dim() - len(self.global_shape)]
            whole = whole.reshape(*leading, math.prod(self.global_shape))
        return whole[region]

    def index_of(self, local: tuple[int, ...]) -> tuple[int, ...]:
        """Return the global index of the element at the index ``local`` of the local tensor."""
        index = tuple(o + i for o, i in zip(self.offsets, local, strict=True))
        if not self.is_flat:
            return index
        return tuple(int(i) for i in torch.unravel_index(torch.tensor(index[0]), self.global_shape))

    @property
    def _holding_shape(self) -> tuple[int, ...]:
        """The shape of the tensor that contains the local tensor as a block."""
        return (math.prod(self.global_shape),) if self.is_flat else self.global_shape


def shard_of(tensor: torch.Tensor) -> Shard:
    """Return a plain tensor or DTensor as this rank's shard, without communication.

    The local tensor is detached, copied to the CPU, and cloned: later updates do not change it.
    Uneven dims follow the rule of DTensor and ``torch.chunk``: all chunks but the last ones have
    ceil(n / ranks) rows. A strided Shard, where tensor parallelism shards a dim before data parallelism does,
    is cut in that order. Raises TypeError for placements other than these and Replicate.
    """
    # Without autograd, so that no DTensor operator runs: one costs as much as this whole function.
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return Shard(
        tensor=local.detach().to("cpu", copy=True),
        offsets=_offsets(tensor) if isinstance(tensor, DTensor) else (0,) * tensor.dim(),
        global_shape=tuple(tensor.shape),
    )


_Placements = tuple[tuple[type[Placement], Placement], ...]  # for each mesh axis, with its type


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """A mesh axis that cuts a dim into ``num_chunks``; this rank has the chunk ``index``."""

    dim: int
    num_chunks: int
    index: int


def _offsets(tensor: DTensor) -> tuple[int, ...]:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("shard_of: expected a rank that is part of the tensor's mesh, got one outside it")
    # The cache key includes the type: releases of torch differ in whether a strided Shard equals a plain one.
    placements = tuple((type(placement), placement) for placement in tensor.placements)
    return _start_of(tuple(tensor.shape), placements, tuple(mesh.shape), tuple(coordinate))


@lru_cache(maxsize=2**12)  # called for each parameter, gradient and optimizer state after each step
def _start_of(
    shape: tuple[int, ...],
    placements: _Placements,
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> tuple[int, ...]:
    """Return the index of the first element of the piece at a mesh coordinate."""
    offsets, sizes = [0] * len(shape), [*shape]
    for cut in _cuts(placements, mesh, coordinate):
        chunk = -(-sizes[cut.dim] // cut.num_chunks)
        start = min(cut.index * chunk, sizes[cut.dim])
        offsets[cut.dim] += start
        sizes[cut.dim] = min(chunk, sizes[cut.dim] - start)
    return tuple(offsets)


def _cuts(placements: _Placements, mesh: tuple[int, ...], coordinate: tuple[int, ...]) -> list[_Cut]:
    """Return the cuts in the order in which they were made: strided ones last, from right to left."""
    plain: list[_Cut] = []
    strided: list[_Cut] = []
    for axis in reversed(range(len(mesh))):
        kind, placement = placements[axis]
        if isinstance(placement, Replicate):
            continue
        dim = getattr(placement, "dim", -1)
        cut = _Cut(dim=dim, num_chunks=mesh[axis], index=coordinate[axis])
        if kind is ShardPlacement:
            plain.insert(0, cut)
        elif _is_strided_over(placement, [c for c in (*plain, *strided) if c.dim == dim]):
            strided.append(cut)
        else:
            raise TypeError(
                "shard_of: expected Shard or Replicate placements, or a strided Shard over all axes to its "
                f"right, got {placement} in {tuple(p for _, p in placements)}; "
                "override the local_* reads of PreparedModel for this engine"
            )
    return [*plain, *strided]


def _is_strided_over(placement: Placement, made_before: list[_Cut]) -> bool:
    """Return whether this is a strided Shard whose piece is one block: only the axes to its right cut its dim before.

    Compares the type's name: the type is not public, and not a subclass of Shard in every release.
    """
    num_pieces = math.prod(cut.num_chunks for cut in made_before)
    return type(placement).__name__ == "_StridedShard" and getattr(placement, "split_factor", 0) == num_pieces
