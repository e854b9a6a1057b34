"""Cuts a tensor into equal, padded shards, and maps between its whole and cut forms.

Dim 0 may be uneven: like ``torch.chunk``, every shard but the last ones has ``ceil(n / ranks)`` rows, and every
shard is padded to that for communication. Other dims must divide evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardproof.engine.reference.mesh import DataMesh
from shardproof.engine.reference.torch_private import local_tensor


@dataclass(frozen=True, kw_only=True)  # without slots, for cached_property
class Geometry:
    """The cut of a tensor of ``shape`` along ``dim`` over ``ranks``, of which this is ``rank``."""

    shape: torch.Size
    dim: int
    ranks: int
    rank: int

    @cached_property
    def rows(self) -> int:
        """The rows of a full, padded shard along ``dim``."""
        return -(-self.shape[self.dim] // self.ranks)

    @cached_property
    def padded_shape(self) -> torch.Size:
        """The shape of every padded shard."""
        return self._with_rows(self.rows)

    @cached_property
    def whole_stride(self) -> tuple[int, ...]:
        return torch.empty(self.shape, device="meta").stride()

    @cached_property
    def padded_numel(self) -> int:
        """The number of elements of every padded shard."""
        return self.padded_shape.numel()

    @cached_property
    def shard_shape(self) -> torch.Size:
        """The shape of this rank's shard, which may be short or empty."""
        first = min(self.rank * self.rows, self.shape[self.dim])
        return self._with_rows(min(self.rows, self.shape[self.dim] - first))

    @cached_property
    def is_even(self) -> bool:
        """Whether no shard needs padding."""
        return self.rows * self.ranks == self.shape[self.dim]

    def shard_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of ``whole`` (shape ``shape``) as a view of shape ``shard_shape``."""
        first = min(self.rank * self.rows, self.shape[self.dim])
        return whole.narrow(self.dim, first, self.shard_shape[self.dim])

    def own_part(self, padded: torch.Tensor) -> torch.Tensor:
        """View this rank's padded shard (1-D, ``padded_numel``) as ``shard_shape``, padding left out."""
        own = padded if self.is_even else padded[: self.shard_shape.numel()]
        return own.view(self.shard_shape)

    def whole_part(self, gathered: torch.Tensor) -> torch.Tensor:
        """View a gathered tensor (1-D, ``ranks * padded_numel``, in natural order) as ``shape``."""
        return gathered[: self.shape.numel()].view(self.shape)

    def by_rank(self, gathered: torch.Tensor) -> torch.Tensor:
        """View a 1-D tensor in natural order as (ranks, ...): entry r is where the shard of rank r belongs."""
        if self.dim == 0:
            return gathered.view(self.ranks, self.padded_numel)
        return self.shards_first(gathered.view(self.shape))

    def shards_first(self, whole: torch.Tensor) -> torch.Tensor:
        """View ``whole`` (shape ``shape``) so that equal chunks of dim 0, the last ones maybe short, are its shards."""
        if self.dim == 0:
            return whole
        split: torch.Tensor = whole.unflatten(self.dim, (self.ranks, self.rows))
        return split.movedim(self.dim, 0)

    def _with_rows(self, rows: int) -> torch.Size:
        return torch.Size((*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :]))


def plan_cut(parameter: nn.Parameter, name: str, mesh: DataMesh, placement: Shard | None) -> Geometry:
    """Return how ``parameter`` will be cut over ``mesh``; changes nothing.

    Raises ValueError for scalars, and NotImplementedError for tensors that are not contiguous and for uneven dims
    other than 0.
    """
    _check_axes(parameter, name, mesh)
    local = local_part(parameter)
    if local.dim() == 0:
        raise ValueError(
            f"fully_shard doesn't support scalar parameters: {name!r} has no dim to shard; "
            "make it a 1D tensor of one element"
        )
    if not local.is_contiguous():
        raise NotImplementedError(
            f"fully_shard: does not support non-contiguous parameters: {name!r} has shape "
            f"{tuple(local.shape)} and stride {local.stride()}; call .contiguous() on it before"
        )
    geometry = Geometry(
        shape=local.shape, dim=_shard_dim(placement, local, name), ranks=mesh.shard_size, rank=mesh.shard_rank
    )
    if geometry.dim and not geometry.is_even:
        raise NotImplementedError(
            f"fully_shard: does not support uneven sharding on dim {geometry.dim}: {name!r} of shape "
            f"{tuple(local.shape)} over {geometry.ranks} ranks; return a dim that they divide, or Shard(0)"
        )
    return geometry


def _check_axes(parameter: nn.Parameter, name: str, mesh: DataMesh) -> None:
    """Raise ValueError for a parameter that is not whole along the data axes of the mesh that has all axes."""
    if mesh.whole is None:
        return
    if not isinstance(parameter, DTensor):
        raise ValueError(
            f"dp_mesh_dims: expected DTensors on {mesh.whole}, got a plain tensor for {name!r}; try distribute_module"
        )
    if parameter.device_mesh != mesh.whole:
        raise ValueError(
            f"dp_mesh_dims: expected {name!r} on the same mesh as was given, {mesh.whole}, got one on "
            f"{parameter.device_mesh}; distribute it over all axes"
        )
    cut = [axis for axis in sorted(mesh.data_axes) if not isinstance(parameter.placements[axis], Replicate)]
    if cut:
        raise ValueError(
            f"dp_mesh_dims: expected Replicate() of {name!r} along the axes of data, got {parameter.placements}; "
            f"leave axes {cut} to fully_shard"
        )


def local_part(parameter: nn.Parameter) -> torch.Tensor:
    """Return the tensor that data-parallel ranks share: this rank's part if the parameter is a DTensor already."""
    whole: torch.Tensor = parameter.detach()
    return local_tensor(whole) if isinstance(whole, DTensor) else whole


def _shard_dim(placement: Shard | None, local: torch.Tensor, name: str) -> int:
    dim = 0 if placement is None else placement.dim
    if not -local.dim() <= dim < local.dim():
        raise ValueError(
            f"shard_placement_fn: expected Shard of a dim below {local.dim()} for {name!r} of shape "
            f"{tuple(local.shape)}, got {placement}"
        )
    return dim % local.dim()
