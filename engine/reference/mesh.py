"""The data-parallel ranks: which mesh axis shards and which replicates."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate

from shardproof.engine.reference.policies import MeshDims
from shardproof.engine.reference.torch_private import concatenated, joined


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks that together hold one copy of the parameters, and those with the same shard; None: this rank alone."""

    shard_group: dist.ProcessGroup | None
    replicate_group: dist.ProcessGroup | None
    shard_mesh: DeviceMesh | None = None  # the mesh of the shard group, if known

    @property
    def shard_size(self) -> int:
        """The number of ranks over which a parameter is split."""
        return 1 if self.shard_group is None else self.shard_group.size()

    @property
    def shard_rank(self) -> int:
        """Which of the shards this rank holds."""
        return 0 if self.shard_group is None else self.shard_group.rank()

    @property
    def replicate_size(self) -> int:
        """The number of copies of each shard."""
        return 1 if self.replicate_group is None else self.replicate_group.size()

    @property
    def is_replicated(self) -> bool:
        """Whether there is a group of replicas, even if of one rank."""
        return self.replicate_group is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataMesh(Ranks):
    """The ranks of a 1-D or 2-D device mesh, read as an axis that shards, an axis that replicates, or both.

    If parameters lie on a mesh of all axes, ``whole`` is that mesh, and ``data_axes`` are the axes that form ``mesh``.
    """

    mesh: DeviceMesh
    shard_axis: int | None
    whole: DeviceMesh | None = None
    data_axes: frozenset[int] = frozenset()

    @classmethod
    def of(cls, mesh: DeviceMesh, *, shard_axis: int | None, replicate_axis: int | None) -> DataMesh:
        """Read ``mesh``; an axis may be missing."""
        return cls(
            shard_group=None if shard_axis is None else mesh.get_group(shard_axis),
            replicate_group=None if replicate_axis is None else mesh.get_group(replicate_axis),
            mesh=mesh,
            shard_axis=shard_axis,
        )

    @property
    def axis_of_shards(self) -> DeviceMesh:
        """The axis that shards, as a mesh of its own; the whole mesh if it has no other axis."""
        names = self.mesh.mesh_dim_names
        return self.mesh if self.mesh.ndim == 1 or names is None else self.mesh[names[self.shard_axis or 0]]

    def placements(self, shard: Placement) -> tuple[Placement, ...]:
        """Return one placement per mesh axis for a tensor split by ``shard``."""
        return tuple(shard if axis == self.shard_axis else Replicate() for axis in range(self.mesh.ndim))


def sharding_mesh(mesh: DeviceMesh | None) -> DataMesh:
    """Read ``mesh`` as ``fully_shard`` does: 1-D shards, 2-D replicates over axis 0 and shards over axis 1.

    None means all ranks of the default process group. Raises ValueError for other meshes.
    """
    mesh = _world_mesh(None) if mesh is None else mesh
    if mesh.ndim == 1:
        return DataMesh.of(mesh, shard_axis=0, replicate_axis=None)
    if mesh.ndim != 2:
        raise ValueError(
            "fully_shard: expects a 1D or 2D DeviceMesh (shard, or replicate x shard), "
            f"got {mesh.ndim}D {mesh}; pass the data-parallel slice of it, as mesh['dp']"
        )
    if mesh.mesh_dim_names is None:
        raise ValueError(
            f"fully_shard: a 2D DeviceMesh must have mesh_dim_names, so that it can be sliced; got {mesh}; "
            "try init_device_mesh(..., mesh_dim_names=('replicate', 'shard'))"
        )
    return DataMesh.of(mesh, shard_axis=1, replicate_axis=0)


def mesh_of_axes(mesh: DeviceMesh | None, dims: MeshDims) -> DataMesh:
    """Read the axes of ``mesh`` that ``dims`` names as those of data; raises ValueError for none, or unknown ones."""
    whole = _world_mesh(("shard",)) if mesh is None else mesh
    known = whole.mesh_dim_names or ()
    shards, replicas = tuple(dims.shard_names), tuple(dims.replicate_names)
    if not shards and not replicas:
        raise ValueError(
            "dp_mesh_dims: expected at least one of shard or replicate, got neither; name an axis"
        )
    if unknown := [name for name in (*shards, *replicas) if name not in known]:
        raise ValueError(
            f"dp_mesh_dims: expected names of axes among {known}, got {unknown}, not found there"
        )
    parts = [joined(whole, names) for names in (replicas, shards) if names]
    data = DataMesh.of(
        parts[0] if len(parts) == 1 else concatenated(*parts),
        shard_axis=len(parts) - 1 if shards else None,
        replicate_axis=0 if replicas else None,
    )
    return replace(data, whole=whole, data_axes=frozenset(known.index(name) for name in (*shards, *replicas)))


def replicating_mesh(mesh: DeviceMesh | None) -> DataMesh:
    """Read ``mesh`` as ``replicate`` does: every rank of a 1-D mesh holds a copy; else raises ValueError."""
    mesh = _world_mesh(("replicate",)) if mesh is None else mesh
    if mesh.ndim != 1:
        raise ValueError(
            f"replicate expects a 1D DeviceMesh, got {mesh.ndim}D {mesh}; "
            "pass one axis of it, or use fully_shard for replicate x shard"
        )
    return DataMesh.of(mesh, shard_axis=None, replicate_axis=0)


def compute_device(mesh: DeviceMesh) -> torch.device:
    """Return the device on which this rank computes."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def subgroup_of(mesh: Ranks, size: int, known: dict[tuple[int, ...], dist.ProcessGroup]) -> dist.ProcessGroup:
    """Return the process group of ``size`` neighbours in the shard group, this rank included.

    Reuses the groups in ``known`` and adds new ones: a collective call over each group's own ranks.
    """
    whole = mesh.shard_group
    assert whole is not None
    ranks = dist.get_process_group_ranks(whole)
    first = mesh.shard_rank // size * size
    mine = tuple(ranks[first : first + size])
    if mine not in known:
        made = dist.new_group(list(mine), use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        known[mine] = made
    return known[mine]


def _world_mesh(names: tuple[str, ...] | None) -> DeviceMesh:
    if not dist.is_initialized():
        raise RuntimeError(
            "mesh=None: expected an initialised default process group to shard over, got none; "
            "call torch.distributed.init_process_group first or pass a DeviceMesh"
        )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = "cpu" if accelerator is None else accelerator.type
    return init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=names)
