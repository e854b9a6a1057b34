"""Interprets the wrappers' arguments, connects wrappers with each other, and prepares models before sharding."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, StateDictSettings

from shardproof.engine.reference.autograd_hooks import map_tensors
from shardproof.engine.reference.fsdp1.materialize import broadcast_states, materialize, move_to_device
from shardproof.engine.reference.fsdp1.wrap_policy import wrap_below
from shardproof.engine.reference.fsdp_state import FSDPState
from shardproof.engine.reference.fully_shard import unmanaged
from shardproof.engine.reference.mesh import Ranks
from shardproof.engine.reference.param_group import FSDPParamGroup
from shardproof.engine.reference.torch_private import HYBRID_SHARD_ZERO2

HYBRID = frozenset({ShardingStrategy.HYBRID_SHARD, HYBRID_SHARD_ZERO2})
"""The strategies that shard within a group and replicate across groups."""

ProcessGroups = dist.ProcessGroup | tuple[dist.ProcessGroup, dist.ProcessGroup] | None
"""One group, or for hybrid strategies the shard group and the replicate group; None is the default group."""


def rank_groups(
    strategy: ShardingStrategy,
    process_group: ProcessGroups,
    device_mesh: DeviceMesh | None,
    *,
    is_shared: bool,
) -> tuple[ShardingStrategy, Ranks]:
    """Return the groups that ``strategy`` shards and replicates over; for a single rank the strategy is NO_SHARD.

    A hybrid strategy without groups or a mesh shards over the ranks of each node. The groups are created here,
    collectively, if ``is_shared`` allows it: then all wrappers below use the same groups.

    Raises ValueError for arguments that exclude each other or do not suit the strategy.
    """
    if process_group is not None and device_mesh is not None:
        raise ValueError(
            "FullyShardedDataParallel: Cannot pass both process_group and device_mesh; expected one of them"
        )
    if strategy in HYBRID:
        return strategy, _hybrid_groups(strategy, process_group, device_mesh, is_shared=is_shared)
    group = process_group if device_mesh is None else device_mesh.get_group(0)
    if isinstance(group, tuple):
        raise ValueError(
            f"process_group: expected one group for {strategy}, got a tuple; tuples are for hybrid strategies"
        )
    group = _default_group() if group is None else group
    if group.size() == 1 and strategy is not ShardingStrategy.NO_SHARD:
        warnings.warn(
            f"FSDP is switching to use `NO_SHARD` instead of {strategy} since the world size is 1.",
            stacklevel=3,
        )
        strategy = ShardingStrategy.NO_SHARD
    if strategy is ShardingStrategy.NO_SHARD:
        return strategy, Ranks(shard_group=None, replicate_group=group)
    return strategy, Ranks(shard_group=group, replicate_group=None, shard_mesh=device_mesh)


def _hybrid_groups(
    strategy: ShardingStrategy,
    process_group: ProcessGroups,
    device_mesh: DeviceMesh | None,
    *,
    is_shared: bool,
) -> Ranks:
    if device_mesh is not None:
        if device_mesh.ndim != 2:
            raise ValueError(
                f"device_mesh: Expected device_mesh to have ndim=2 (replicate, shard) for {strategy}, "
                f"got {device_mesh.ndim}"
            )
        return Ranks(shard_group=device_mesh.get_group(1), replicate_group=device_mesh.get_group(0))
    if process_group is None:
        if not is_shared:
            raise ValueError(
                f"process_group: Manual wrapping with {strategy} requires explicit specification of process group or "
                "device_mesh, got neither: each wrapper would make groups of its own; try device_mesh=..."
            )
        return _groups_of_nodes()
    match process_group:
        case (dist.ProcessGroup() as shard, dist.ProcessGroup() as replicate):
            return Ranks(shard_group=shard, replicate_group=replicate)
    raise ValueError(
        "process_group: Expected process_group to be passed in as either None or Tuple[dist.ProcessGroup, "
        f"dist.ProcessGroup] for {strategy} (shard, replicate), got {type(process_group).__name__}"
    )


def _groups_of_nodes() -> Ranks:
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
    return Ranks(shard_group=_own(shard[rank // size]), replicate_group=_own(replicate[rank % size]))


def _own(group: object) -> dist.ProcessGroup:
    assert isinstance(group, dist.ProcessGroup)  # torch represents the group on other ranks by an int
    return group


def _default_group() -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise ValueError(
            "process_group=None: expected an initialised default process group, got none; "
            "call torch.distributed.init_process_group first, or pass a group"
        )
    return _own(dist.group.WORLD)


class WrapperPrecision:
    """`MixedPrecision` with the fields that a unit reads: a root wrapper casts inputs by another switch."""

    output_dtype = None

    def __init__(self, mixed: MixedPrecision | None, is_root: Callable[[], bool]) -> None:
        self.mixed = mixed or MixedPrecision()
        self._is_root = is_root

    @property
    def param_dtype(self) -> torch.dtype | None:
        """The dtype of gathered parameters."""
        return self.mixed.param_dtype

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype of gradients in communication; None means ``param_dtype``."""
        return self.mixed.reduce_dtype or self.mixed.param_dtype

    @property
    def cast_forward_inputs(self) -> bool:
        return self.mixed.cast_root_forward_inputs if self._is_root() else self.mixed.cast_forward_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignored:
    """The ignored states of a wrapper; ``parameters`` contains those of ``modules`` too."""

    modules: frozenset[nn.Module]
    parameters: frozenset[nn.Parameter]


def ignored_states(
    root: nn.Module,
    modules: Iterable[nn.Module] | None,
    states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
    is_wrapper: Callable[[nn.Module], bool],
) -> Ignored:
    """Read the two arguments that name ignored states; raises ValueError for other types."""
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
        warnings.warn(
            f"ignored_modules: got the wrapped {type(root).__name__} itself, so all of its parameters are ignored",
            stacklevel=4,
        )
    below = {m for module in chosen for m in module.modules() if not is_wrapper(m)}
    owned = {p for m in below for p in m.parameters(recurse=False)}
    return Ignored(modules=frozenset(below), parameters=frozenset(owned | set(parameters)))


class WrapperBase(nn.Module):
    """A module that replaces another one, whose parameters it manages as one unit."""

    sharding_strategy: ShardingStrategy
    mixed_precision: MixedPrecision
    ranks: Ranks
    ignored: Ignored
    compute_device: torch.device
    is_flat: bool
    """Whether the optimizer receives one flat parameter."""
    is_summoned: bool
    """Whether modules have whole parameters, for a caller."""
    buffer_dtypes: dict[tuple[nn.Module, str], torch.dtype]
    """The dtypes of buffers before they were cast, by module and name."""
    state_dict_settings: StateDictSettings
    _fsdp_state: FSDPState
    _fsdp_wrapped_module: nn.Module

    @property
    def wrapped(self) -> nn.Module:
        return self._fsdp_wrapped_module

    @property
    def groups(self) -> tuple[FSDPParamGroup, ...]:
        """This wrapper's communication group; none if it has no parameters of its own."""
        return self._fsdp_state.param_groups

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group that shards; with NO_SHARD the one that replicates."""
        group = self.ranks.shard_group or self.ranks.replicate_group
        assert group is not None
        return group

    @property
    def rank(self) -> int:
        """This rank's number in ``process_group``."""
        return self.process_group.rank()

    @property
    def world_size(self) -> int:
        """The size of ``process_group``."""
        return self.process_group.size()

    @property
    def is_running(self) -> bool:
        """Whether the model that contains this wrapper is in forward or backward."""
        return self._fsdp_state.root_state is not None and self._fsdp_state.root_state.is_running

    # Any: attributes of the wrapped module, of any type.
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_fsdp_wrapped_module":  # not there yet
                raise
            return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: Any) -> Any:
        inner: Any = self._fsdp_wrapped_module
        return inner[key]


def wrappers_in(module: nn.Module) -> list[WrapperBase]:
    """List the wrappers in ``module``, itself included, outer ones first."""
    return [m for m in module.modules() if isinstance(m, WrapperBase)]


def wrap_inside(
    wrapper_class: Callable[..., nn.Module],
    module: nn.Module,
    policy: Any,  # torch's policies have no common class
    ignored: Ignored,
    options: Mapping[str, Any],
) -> None:
    """Wrap the submodules that ``policy`` chooses with ``options``, unless the policy returns other options."""

    def wrap(inner: nn.Module, own: Mapping[str, Any]) -> nn.Module:
        return wrapper_class(inner, **{**options, **own})

    kept = _kept_precise(module, options["mixed_precision"])
    for inner in kept:
        _compute_in_float32(inner)
    wrap_below(
        module,
        policy,
        wrap=wrap,
        is_wrapped=lambda inner: isinstance(inner, WrapperBase),
        ignored_modules=ignored.modules,
        ignored_parameters=ignored.parameters,
        also={inner: {"mixed_precision": None} for inner in kept},
    )


def _kept_precise(module: nn.Module, mixed: MixedPrecision | None) -> list[nn.Module]:
    """List the modules inside whose class is exempt from mixed precision: they become units of their own."""
    if mixed is None or not mixed._module_classes_to_ignore:
        return []
    exempt = tuple(mixed._module_classes_to_ignore)
    return [inner for inner in module.modules() if inner is not module and isinstance(inner, exempt)]


def _compute_in_float32(module: nn.Module) -> None:
    """Cast inputs to float32, and outputs to the dtype of the first input."""
    given: list[torch.dtype] = []

    # Any: a module's inputs and outputs are of any type.
    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        def widened(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor
            given.append(tensor.dtype)
            return tensor.float()

        given.clear()
        return map_tensors(widened, args), map_tensors(widened, kwargs)

    def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        if not given:
            return output
        dtype = given[0]
        return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, output)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


def prepare_states(
    module: nn.Module,
    ignored: Ignored,
    param_init_fn: Callable[[nn.Module], None] | None,
    device_id: int | torch.device | None,
    synchronised_by: Sequence[dist.ProcessGroup],
) -> torch.device:
    """Allocate all states that are not wrapped yet, move them to a device and, on request, broadcast rank 0's values.

    Returns the device. Leaves ignored states and those of wrappers inside unchanged.
    """
    inside = wrappers_in(module)
    modules = {*ignored.modules, *(m for wrapper in inside for m in wrapper.modules())}
    device = torch.device("cpu") if device_id is None else torch.device(device_id)
    materialize(module, param_init_fn=param_init_fn, device=device, ignored_modules=modules)
    own_device = move_to_device(
        module, device_id, ignored_modules=modules, ignored_parameters=ignored.parameters
    )
    for group in synchronised_by:
        broadcast_states(module, group, ignored_modules=modules, ignored_parameters=ignored.parameters)
    has_own = unmanaged((module,), set(ignored.parameters))
    return own_device if has_own or not inside else inside[0].compute_device
