"""One rank's piece of a tensor and where it lies in the whole."""

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

    A piece is a block, with one offset per dim, or it is flat: an interval of the flattened tensor as a
    tensor of one dim, with one offset, its start (``Shard.flat`` makes one). A whole tensor has offsets of
    zero and its own shape; a rank that owns nothing of a tensor has a local tensor with a dim of size 0.
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
        """Whether the piece has as many dims and offsets as it must, and lies within the whole."""
        shape, local = self._holding_shape, tuple(self.tensor.shape)
        if len(local) != len(shape) or len(self.offsets) != len(shape):
            return False
        spans = zip(self.offsets, local, shape, strict=True)
        return all(start >= 0 and start + size <= end for start, size, end in spans)

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Read this piece's elements out of the last dims of ``whole``: a view, if ``whole`` is contiguous."""
        spans = (slice(o, o + n) for o, n in zip(self.offsets, self.tensor.shape, strict=True))
        region: tuple[EllipsisType | slice, ...] = (..., *spans)
        if self.is_flat:
            leading = whole.shape[: whole.dim() - len(self.global_shape)]
            whole = whole.reshape(*leading, math.prod(self.global_shape))
        return whole[region]

    def index_of(self, local: tuple[int, ...]) -> tuple[int, ...]:
        """Return the index in the whole of the element at the index ``local`` of the local tensor."""
        index = tuple(o + i for o, i in zip(self.offsets, local, strict=True))
        if not self.is_flat:
            return index
        return tuple(int(i) for i in torch.unravel_index(torch.tensor(index[0]), self.global_shape))

    @property
    def _holding_shape(self) -> tuple[int, ...]:
        """The shape of that of which the local tensor is a block."""
        return (math.prod(self.global_shape),) if self.is_flat else self.global_shape


def shard_of(tensor: torch.Tensor) -> Shard:
    """Describe a plain tensor or DTensor as this rank's shard, without communication.

    The local tensor is detached, copied to the CPU, and cloned: later updates do not change it.
    Uneven dims follow DTensor's rule, that of ``torch.chunk``: all chunks but the last ones have
    ceil(n / ranks) rows. A dim that tensor parallelism shards before data parallelism does, which DTensor
    calls strided, is cut in that order. Raises TypeError for other placements than these and Replicate.
    """
    # Without autograd, so that no operator of DTensor's runs: one costs as much as all of this.
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return Shard(
        tensor=local.detach().to("cpu", copy=True),
        offsets=_offsets(tensor) if isinstance(tensor, DTensor) else (0,) * tensor.dim(),
        global_shape=tuple(tensor.shape),
    )


_Placements = tuple[tuple[type[Placement], Placement], ...]  # of each axis of a mesh, with its type


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """One mesh axis that cuts one dim into ``num_chunks``, of which this rank has the chunk ``index``."""

    dim: int
    num_chunks: int
    index: int


def _offsets(tensor: DTensor) -> tuple[int, ...]:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("shard_of: expected a rank that is part of the tensor's mesh, got one outside it")
    # By type too: releases of torch differ in whether a strided Shard equals one that is not.
    placements = tuple((type(placement), placement) for placement in tensor.placements)
    return _start_of(tuple(tensor.shape), placements, tuple(mesh.shape), tuple(coordinate))


@lru_cache(maxsize=2**12)  # each parameter is read after each step, with its gradient and its optimizer state
def _start_of(
    shape: tuple[int, ...],
    placements: _Placements,
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> tuple[int, ...]:
    """Return the index of the first element of the piece at a place of a mesh."""
    offsets, sizes = [0] * len(shape), [*shape]
    for cut in _cuts(placements, mesh, coordinate):
        chunk = -(-sizes[cut.dim] // cut.num_chunks)
        start = min(cut.index * chunk, sizes[cut.dim])
        offsets[cut.dim] += start
        sizes[cut.dim] = min(chunk, sizes[cut.dim] - start)
    return tuple(offsets)


def _cuts(placements: _Placements, mesh: tuple[int, ...], coordinate: tuple[int, ...]) -> list[_Cut]:
    """List the cuts in the order in which they were made: strided ones last, from right to left."""
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
    """Return a strided Shard whose piece is one block: its dim was cut before by the axes to its right, no others.

    By the name of its type: torch has no public one, and makes it no subclass of Shard in every release.
    """
    num_pieces = math.prod(cut.num_chunks for cut in made_before)
    return type(placement).__name__ == "_StridedShard" and getattr(placement, "split_factor", 0) == num_pieces
