"""What a wrapper's arguments come to: which ranks shard and which replicate, in which dtypes, which states to leave."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from engine.reference.mesh import RankGroups
from engine.reference.torch_internals import HYBRID_SHARD_ZERO2

__all__ = ["HYBRID", "Ignored", "ProcessGroups", "WrapperPrecision", "ignored_states", "rank_groups"]

HYBRID = frozenset({ShardingStrategy.HYBRID_SHARD, HYBRID_SHARD_ZERO2})
"""The strategies that shard within a group and replicate across groups."""

ProcessGroups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None
"""One group, or for hybrid strategies that which shards and that which replicates; None is the default group."""


def rank_groups(
    strategy: ShardingStrategy,
    process_group: ProcessGroups,
    device_mesh: DeviceMesh | None,
    *,
    is_shared: bool,
) -> RankGroups:
    """Give the groups that ``strategy`` shards and replicates over.

    A hybrid strategy that is given neither groups nor a mesh shards over the ranks of each node; the groups are made
    here, collectively, which ``is_shared`` allows: then all wrappers below are given the same.

    Raises ValueError for arguments that exclude each other or do not suit the strategy.
    """
    if process_group is not None and device_mesh is not None:
        raise ValueError(
            "FullyShardedDataParallel: Cannot pass both process_group and device_mesh; expected one of them"
        )
    if strategy in HYBRID:
        return _hybrid_groups(strategy, process_group, device_mesh, is_shared=is_shared)
    group = process_group if device_mesh is None else device_mesh.get_group(0)
    if isinstance(group, tuple):
        raise ValueError(
            f"process_group: expected one group for {strategy}, got a tuple; tuples are for hybrid strategies"
        )
    group = _default_group() if group is None else group
    if strategy is ShardingStrategy.NO_SHARD:
        return RankGroups(shard_group=None, replicate_group=group)
    return RankGroups(shard_group=group, replicate_group=None)


def _hybrid_groups(
    strategy: ShardingStrategy,
    process_group: ProcessGroups,
    device_mesh: DeviceMesh | None,
    *,
    is_shared: bool,
) -> RankGroups:
    if device_mesh is not None:
        if device_mesh.ndim != 2:
            raise ValueError(
                f"device_mesh: Expected device_mesh to have ndim=2 (replicate, shard) for {strategy}, "
                f"got {device_mesh.ndim}"
            )
        return RankGroups(shard_group=device_mesh.get_group(1), replicate_group=device_mesh.get_group(0))
    if process_group is None:
        if not is_shared:
            raise ValueError(
                f"process_group: Manual wrapping with {strategy} requires explicit specification of process group or "
                "device_mesh, got neither: each wrapper would make groups of its own; try device_mesh=..."
            )
        return _groups_of_nodes()
    match process_group:
        case (dist.ProcessGroup() as shard, dist.ProcessGroup() as replicate):
            return RankGroups(shard_group=shard, replicate_group=replicate)
    raise ValueError(
        "process_group: Expected process_group to be passed in as either None or Tuple[dist.ProcessGroup, "
        f"dist.ProcessGroup] for {strategy} (shard, replicate), got {type(process_group).__name__}"
    )


def _groups_of_nodes() -> RankGroups:
    """Shard over the ranks of a node, replicate over nodes: groups of equal size of the default group's ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    size = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or torch.accelerator.device_count() or world
    size = min(size, world)
    if world % size:
        raise ValueError(
            f"process_group: expected nodes of equally many ranks, got {world} ranks over nodes of {size}; "
            "pass process_group=(shard group, replicate group)"
        )
    shard = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    replicate = [dist.new_group(list(range(first, world, size))) for first in range(size)]
    return RankGroups(shard_group=_own(shard[rank // size]), replicate_group=_own(replicate[rank % size]))


def _own(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup)  # torch marks the ranks outside a group by an int
    return group


def _default_group() -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise ValueError(
            "process_group=None: expected an initialised default process group, got none; "
            "call torch.distributed.init_process_group first, or pass a group"
        )
    return _own(dist.group.WORLD)


class WrapperPrecision:
    """`MixedPrecision` as a unit reads it: a wrapper casts inputs by another switch where it is the root."""

    output_dtype = None

    def __init__(self, mixed: MixedPrecision | None, is_root: Callable[[], bool]) -> None:
        self.mixed = mixed or MixedPrecision()
        self._is_root = is_root

    @property
    def param_dtype(self) -> torch.dtype | None:
        """Of gathered parameters."""
        return self.mixed.param_dtype

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """Of gradients on the wire; None means ``param_dtype``."""
        return self.mixed.reduce_dtype

    @property
    def cast_forward_inputs(self) -> bool:
        """Whether inputs are cast."""
        return self.mixed.cast_root_forward_inputs if self._is_root() else self.mixed.cast_forward_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignored:
    """What a wrapper leaves alone; ``parameters`` hold those of ``modules`` too."""

    modules: frozenset[nn.Module]
    parameters: frozenset[nn.Parameter]


def ignored_states(
    root: nn.Module,
    modules: Iterable[nn.Module] | None,
    states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
    is_wrapper: Callable[[nn.Module], bool],
) -> Ignored:
    """Read the two ways of saying what to ignore; raises ValueError for what is neither."""
    if modules is not None and states is not None:
        raise ValueError(
            "FullyShardedDataParallel: Cannot pass both ignored_modules and ignored_states at the same time; "
            "expected ignored_states alone"
        )
    given: list[object] = list(modules if modules is not None else states or ())
    chosen = [m for m in given if isinstance(m, nn.Module)]
    parameters = [p for p in given if isinstance(p, nn.Parameter)]
    if modules is not None and len(chosen) < len(given):
        raise ValueError(
            f"ignored_modules: expected modules, got {sorted({type(g).__name__ for g in given})}; "
            "pass parameters as ignored_states"
        )
    if len(chosen) + len(parameters) < len(given) or (chosen and parameters):
        raise ValueError(
            "ignored_states: expected all nn.Parameter or all nn.Module, "
            f"got {sorted({type(g).__name__ for g in given})}"
        )
    if any(is_wrapper(m) for m in chosen):
        raise ValueError(
            "ignored_modules: expected modules that are not wrapped, got FullyShardedDataParallel"
        )
    if root in chosen:
        raise ValueError(f"ignored_modules: expected modules below {type(root).__name__}, got it itself")
    below = {m for module in chosen for m in module.modules() if not is_wrapper(m)}
    owned = {p for m in below for p in m.parameters(recurse=False)}
    return Ignored(modules=frozenset(below), parameters=frozenset(owned | set(parameters)))
