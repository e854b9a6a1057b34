"""A parameter sharded by itself: the optimizer owns a DTensor over the data-parallel mesh."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Shard

from engine.reference.complex_views import keep_complex_views_in_place
from engine.reference.geometry import Geometry
from engine.reference.mesh import DataMesh
from engine.reference.parameter import WRITE_MARK, ManagedParameter, Site, WriteMark
from engine.reference.torch_internals import concatenated, local_tensor, sharded_like, strided_shard

__all__ = ["ShardedParameter", "cut_parameter", "plan_cut"]


class ShardedParameter(ManagedParameter):
    """A parameter whose part is a tensor of its own.

    ``sharded`` is a DTensor over the data-parallel mesh (and the tensor-parallel one, if it was a DTensor before).
    """

    def __init__(
        self, *, sharded: nn.Parameter, origin: nn.Parameter, sites: tuple[Site, ...], geometry: Geometry
    ) -> None:
        super().__init__(origin=origin, sites=sites, shape=geometry.shape)
        self.sharded = sharded
        self.geometry = geometry
        self._inner = _described(origin)
        self._write_mark = WriteMark()

    @property
    def owned(self) -> nn.Parameter:
        """The DTensor."""
        return self.sharded

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard, of shape ``geometry.shard_shape``."""
        return local_tensor(self._template)

    def watch_writes(self, on_write: Callable[[], None]) -> None:
        """Have ``on_write`` called when one of torch's optimizers has stepped over this parameter."""
        self._write_mark = WriteMark(on_write)
        setattr(self.sharded, WRITE_MARK, self._write_mark)

    def current(self) -> nn.Parameter:
        """Give the sharded parameter as the modules hold it, replaced or not."""
        found = self.sites[0].holds()
        return self.sharded if found is None or found is self.unsharded else found

    def adopt(self) -> None:
        """Take over a parameter that was registered in place of the sharded one, as loading may do."""
        found = self.current()
        if found is self.sharded:
            setattr(found, WRITE_MARK, self._write_mark)  # torch swaps attributes too when it converts
            return
        if not isinstance(found, DTensor) or found.placements != self._template.placements:
            raise RuntimeError(
                f"parameter {self.name!r}: expected a DTensor with placements {self._template.placements}, "
                f"got {type(found).__name__} of shape {tuple(found.shape)} registered in its place; "
                "change parameters before sharding, or load DTensors"
            )
        self.sharded = found
        setattr(found, WRITE_MARK, self._write_mark)
        self.register_sharded()

    def register_unsharded(self) -> None:
        """Let modules see the plain tensor."""
        self.follow_requires_grad()
        assert self.unsharded is not None
        for site in self.sites:
            site.put(self.unsharded)

    def register_sharded(self) -> None:
        """Let modules see the DTensor."""
        for site in self.sites:
            site.put(self.sharded)

    def accept_gradient(self, local: torch.Tensor) -> None:
        """Add a reduced gradient (this rank's shard) to the sharded parameter's."""
        if self.sharded.grad is None:
            self.sharded.grad = sharded_like(self._template, local)
            return
        existing = self.sharded.grad
        (local_tensor(existing) if isinstance(existing, DTensor) else existing).add_(local)

    @property
    def _template(self) -> DTensor:
        if not isinstance(self.sharded, DTensor):
            raise RuntimeError(
                f"parameter {self.name!r}: expected the DTensor that fully_shard made, got a "
                f"{type(self.sharded).__name__}; load DTensors, or load before sharding"
            )
        return self.sharded

    def _whole(self, memory: torch.Tensor) -> torch.Tensor:
        # .data: a version counter of its own, so that gathering again does not look to autograd like an
        # in-place change of what forward saved.
        whole = self.geometry.whole_part(memory).data
        return whole if self._inner is None else sharded_like(self._inner, whole)

    def _plain(self, gradient: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """Give this rank's part of a tensor-parallel gradient, laid out as the parameter is."""
        if not isinstance(gradient, DTensor) or self._inner is None:
            return gradient
        if gradient.placements != self._inner.placements:
            # Cast first: this may reduce over the tensor-parallel axis, and must do so in ``dtype``.
            wide = gradient if dtype is None else gradient.to(dtype)
            assert isinstance(wide, DTensor)
            gradient = wide.redistribute(placements=self._inner.placements)
        return gradient.to_local()


def _described(origin: nn.Parameter) -> DTensor | None:
    """Keep how a parameter lay on ranks before it was sharded, without its memory."""
    detached: torch.Tensor = origin.detach()
    if not isinstance(detached, DTensor):
        return None
    return sharded_like(detached, torch.empty(0, dtype=detached.dtype))


def plan_cut(
    parameter: nn.Parameter, sites: tuple[Site, ...], mesh: DataMesh, placement: Shard | None
) -> Geometry:
    """Say how ``parameter`` will be cut over ``mesh``; changes nothing.

    Raises ValueError for scalars and NotImplementedError for what cannot be sharded: tensors that are not
    contiguous, and uneven dims other than 0.
    """
    name = sites[0].name
    local = _local_part(parameter)
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


def cut_parameter(
    parameter: nn.Parameter,
    sites: tuple[Site, ...],
    mesh: DataMesh,
    geometry: Geometry,
    *,
    home: torch.device,
    pins: bool,
) -> ShardedParameter:
    """Shard ``parameter`` over ``mesh``, keep the shard on ``home`` and register the result at its sites."""
    whole = parameter.detach()
    shard = geometry.shard_of(_local_part(parameter)).clone(memory_format=torch.contiguous_format)
    spread = _over_all_axes(shard, whole, mesh, geometry.dim)
    if not shard.is_meta:
        kept = shard.to(home)  # from_local moves what lies elsewhere to the mesh
        spread = sharded_like(spread, kept.pin_memory() if pins else kept)
    if shard.is_complex():
        keep_complex_views_in_place()
    sharded = nn.Parameter(spread, requires_grad=parameter.requires_grad)
    made = ShardedParameter(sharded=sharded, origin=parameter, sites=sites, geometry=geometry)
    made.register_sharded()
    return made


def _local_part(parameter: nn.Parameter) -> torch.Tensor:
    """Give the tensor that data-parallel ranks share: this rank's part where it is a DTensor already."""
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


def _over_all_axes(shard: torch.Tensor, whole: torch.Tensor, mesh: DataMesh, dim: int) -> DTensor:
    """Wrap this rank's shard as a DTensor over the data-parallel axes and those it already lay on."""
    device_mesh = mesh.mesh
    inner: tuple[Placement, ...] = ()
    placement: Placement = Shard(dim)
    if isinstance(whole, DTensor):
        device_mesh, inner = concatenated(mesh.mesh, whole.device_mesh), whole.placements
        split = _inner_shards(whole, dim)
        # The tensor-parallel axis cut the dim first although it comes last in the mesh.
        placement = strided_shard(dim, split) if split > 1 else placement
    outer = mesh.placements(placement)
    return DTensor.from_local(
        shard, device_mesh, (*outer, *inner), run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _inner_shards(whole: DTensor, dim: int) -> int:
    split = 1
    for axis, placement in enumerate(whole.placements):
        if isinstance(placement, Shard) and placement.dim == dim:
            split *= whole.device_mesh.size(axis)
    return split
