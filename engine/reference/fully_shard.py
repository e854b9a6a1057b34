"""The composable interface: ``fully_shard`` and ``replicate`` change a module in place and return it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from shardproof.engine.reference.fsdp_module import FSDPModule, ReplicateModule, managed_class
from shardproof.engine.reference.fsdp_state import FSDPState, state_of
from shardproof.engine.reference.geometry import plan_cut
from shardproof.engine.reference.mesh import (
    DataMesh,
    compute_device,
    mesh_of_axes,
    replicating_mesh,
    sharding_mesh,
)
from shardproof.engine.reference.param_group import FSDPParamGroup
from shardproof.engine.reference.param_layout import PerParameterLayout
from shardproof.engine.reference.parameter import ParamLocation, ShardedParam, cut_parameter
from shardproof.engine.reference.policies import DTypes, MeshDims, MixedPrecisionPolicy, ShardPlacementResult

Modules = TypeVar("Modules", nn.Module, list[nn.Module])
PlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]

_DEFAULT_DTYPES = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()


def fully_shard(
    module: Modules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: DTypes = _DEFAULT_DTYPES,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: MeshDims | None = None,
) -> Modules:
    """Shard the parameters of ``module`` that no earlier call has taken, as one communication group.

    Apply it to submodules first, then to the root; a list makes one group over several modules. Parameters
    become DTensors, so build the optimizer afterwards. The module's class gains the methods of FSDPModule.

    ``mesh``: 1-D shards, 2-D (named) replicates over axis 0 and shards over axis 1; None: all ranks.
    ``reshard_after_forward``: True frees whole parameters after forward and gathers them again for backward;
    False keeps them; a number k keeps on each rank the part that k neighbours gather again; None is True except for
    the root. ``shard_placement_fn``: per parameter the dim to shard, or a mesh of its own. ``dp_mesh_dims``: the
    data-parallel axes of ``mesh``, for parameters that are DTensors on all of its axes.

    Raises ValueError, TypeError, RuntimeError or NotImplementedError for modules that cannot be sharded.
    """
    data_mesh = sharding_mesh(mesh) if dp_mesh_dims is None else mesh_of_axes(mesh, dp_mesh_dims)
    modules = _checked(module, "fully_shard")
    if dp_mesh_dims is not None and type(reshard_after_forward) is int:
        raise NotImplementedError(
            f"reshard_after_forward={reshard_after_forward}: expected True or False beside dp_mesh_dims"
        )
    reshard = _reshard_policy(reshard_after_forward, data_mesh)
    _manage(
        modules,
        data_mesh,
        FSDPModule,
        dtypes=mp_policy,
        offload=offload_policy,
        ignored=ignored_params,
        placement_fn=shard_placement_fn,
        reshard=False if data_mesh.shard_axis is None else reshard,
    )
    return module


def replicate(
    module: Modules,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: DTypes = _DEFAULT_DTYPES,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: MeshDims | None = None,
) -> Modules:
    """Replicate the parameters of ``module`` that no earlier call has taken over a 1-D ``mesh``.

    ``dp_mesh_dims`` as for ``fully_shard``, without axes to shard. Like ``fully_shard`` with shards of full size:
    parameters become replicated DTensors without gathers, and each call's gradients are all-reduced together as soon as
    backward has computed them.
    """
    data_mesh = replicating_mesh(mesh) if dp_mesh_dims is None else mesh_of_axes(mesh, dp_mesh_dims)
    if data_mesh.shard_axis is not None:
        raise ValueError(
            "replicate: expected dp_mesh_dims without axes to shard, got some; use fully_shard, or name them replicate"
        )
    modules = _checked(module, "replicate")
    _manage(
        modules,
        data_mesh,
        ReplicateModule,
        dtypes=mp_policy,
        offload=offload_policy,
        ignored=ignored_params,
        placement_fn=None,
        reshard=False,
    )
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make ``module.method_name`` gather and free parameters as forward does; does nothing if it is not sharded.

    Raises ValueError when there is no such method.
    """
    state = state_of(module)
    if state is None:
        return
    if not hasattr(module, method_name):
        raise ValueError(
            f"register_fsdp_forward_method: expected a method of {type(module).__name__}, got {method_name!r}, "
            "which it does not have"
        )
    original = getattr(module, method_name)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        if state.is_running(module):  # called by forward, which gathers and frees
            return original(*args, **kwargs)
        args, kwargs = state.before_forward(module, args, kwargs)
        return state.after_forward(module, args, kwargs, original(*args, **kwargs))

    module.__dict__[method_name] = method


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Make several roots use the same streams, so that their collectives do not overlap each other.

    Raises ValueError for a module that is not sharded; does nothing for an empty list.
    """
    states = []
    for module in modules:
        state = state_of(module) if isinstance(module, nn.Module) else None
        if state is None:
            raise ValueError(
                f"share_comm_ctx: expected modules under fully_shard (FSDPModule), got {type(module).__name__}"
            )
        states.append(state)
    for state in states[1:]:
        for below in (state,) if state.root_state is None else state.root_state.states:
            below.share(states[0].comm_ctx)
        if state.root_state is not None:
            state.root_state.comm_ctx = states[0].comm_ctx


def _checked(module: nn.Module | list[nn.Module], caller: str) -> tuple[nn.Module, ...]:
    modules = (module,) if isinstance(module, nn.Module) else tuple(module)
    if not modules:
        raise ValueError(f"{caller}: expected at least one module, got an empty list")
    for one in modules:
        if not isinstance(one, nn.Module):
            raise ValueError(f"{caller}: expected nn.Module, got {type(one).__name__}")
        if type(one).forward is nn.Module.forward:
            raise ValueError(
                f"{caller} does not support containers that do not implement forward: {type(one).__name__}; "
                "apply it to the modules inside"
            )
        if state_of(one) is not None:
            raise RuntimeError(
                f"Cannot apply `{caller}()` on a Module already managed by "
                f"`{'replicate' if isinstance(one, ReplicateModule) else 'fully_shard'}`: "
                f"{type(one).__name__}; one call per module"
            )
    # A module inside another one of the list needs no extra work.
    inside = {m for one in modules for m in one.modules() if m is not one}
    return tuple(dict.fromkeys(m for m in modules if m not in inside))


def _reshard_policy(asked: bool | int | None, mesh: DataMesh) -> bool | int | None:
    if asked is None or isinstance(asked, bool):
        return asked
    if not isinstance(asked, int):
        raise ValueError(
            f"reshard_after_forward: expected True, False, None or a number of ranks, got {asked!r}"
        )
    if asked < 1 or mesh.shard_size % asked:
        raise ValueError(
            f"reshard_after_forward={asked}: should be a factor of the shard axis' size {mesh.shard_size}; "
            f"try one of {[k for k in range(1, mesh.shard_size + 1) if mesh.shard_size % k == 0]}"
        )
    if asked == 1:
        warnings.warn(
            "reshard_after_forward=1 leaves every rank everything; use False to say so", stacklevel=3
        )
        return False
    return True if asked == mesh.shard_size else asked


def _manage(
    modules: tuple[nn.Module, ...],
    mesh: DataMesh,
    base: type[FSDPModule],
    *,
    dtypes: DTypes,
    offload: OffloadPolicy,
    ignored: set[nn.Parameter] | None,
    placement_fn: PlacementFn | None,
    reshard: bool | int | None,
) -> None:
    """Check that all parameters can be sharded, shard them, and add ``base`` to the modules' classes."""
    device = compute_device(mesh.mesh)
    home = torch.device("cpu") if isinstance(offload, CPUOffloadPolicy) else device
    pins = isinstance(offload, CPUOffloadPolicy) and offload.pin_memory and device.type != "cpu"
    planned = []
    for parameter, locations in unmanaged(modules, ignored or set()).items():
        name = locations[0].name
        _check_tensor_parallel(parameter, name, reshard)
        own_mesh, placement = _place(parameter, placement_fn, mesh)
        geometry = plan_cut(parameter, name, own_mesh, placement)
        planned.append((parameter, locations, own_mesh, geometry, _keeps_dtype(parameter, name, dtypes)))
    by_mesh: dict[DataMesh, list[ShardedParam]] = {}
    for parameter, locations, own_mesh, geometry, keeps_dtype in planned:
        cut = cut_parameter(parameter, locations, own_mesh, geometry, home=home, pins=pins)
        cut.keeps_dtype = keeps_dtype
        by_mesh.setdefault(own_mesh, []).append(cut)
    groups = tuple(
        FSDPParamGroup(PerParameterLayout(cut, own, dtypes), own, device, dtypes, offload)
        for own, cut in by_mesh.items()
    )
    _keep_sharded_in_state_dicts(groups)
    for module in _unmanaged_modules(modules):
        for buffer in module.buffers(recurse=False):
            if buffer.device.type not in {device.type, "meta"}:
                buffer.data = buffer.to(device)
    # The modules keep their state.
    FSDPState(modules, groups, device=device, dtypes=dtypes, reshard_after_forward=reshard)
    for module in modules:
        module.__class__ = managed_class(type(module), base)


def unmanaged(
    modules: Iterable[nn.Module], ignored: set[nn.Parameter]
) -> dict[nn.Parameter, tuple[ParamLocation, ...]]:
    """Return the parameters that no call below has taken, each with every place where it is registered."""
    locations: dict[nn.Parameter, list[ParamLocation]] = {}
    for module in _unmanaged_modules(modules):
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in ignored:
                locations.setdefault(parameter, []).append(ParamLocation(module, name))
    return {parameter: tuple(found) for parameter, found in locations.items()}


def _unmanaged_modules(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    seen: set[nn.Module] = set()
    stack = list(reversed(list(modules)))
    while stack:
        module = stack.pop()
        if module in seen or state_of(module) is not None:
            continue
        seen.add(module)
        yield module
        stack.extend(reversed(list(module.children())))


def _place(
    parameter: nn.Parameter, placement_fn: PlacementFn | None, mesh: DataMesh
) -> tuple[DataMesh, Shard | None]:
    chosen = None if placement_fn is None else placement_fn(parameter)
    if isinstance(chosen, ShardPlacementResult):
        return (mesh if chosen.mesh is None else sharding_mesh(chosen.mesh)), chosen.placement
    if chosen is not None and not isinstance(chosen, Shard):
        raise ValueError(
            f"shard_placement_fn: expected Shard, ShardPlacementResult or None, got {chosen!r} "
            f"for a parameter of shape {tuple(parameter.shape)}"
        )
    return mesh, chosen


def _keeps_dtype(parameter: nn.Parameter, name: str, dtypes: DTypes) -> bool:
    """Ask the policy's function, if it has one, whether a parameter computes in its own dtype."""
    choose: Callable[[nn.Parameter], object] | None = getattr(dtypes, "param_dtype_override_fn", None)
    chosen = None if choose is None else choose(parameter)
    if chosen not in (None, dtypes.param_dtype, parameter.dtype):
        raise ValueError(
            f"param_dtype_override_fn: expected {parameter.dtype}, {dtypes.param_dtype} or None for {name!r}, "
            f"got {chosen!r}; other dtypes need a unit of their own"
        )
    return chosen is not None and chosen == parameter.dtype


def _check_tensor_parallel(parameter: nn.Parameter, name: str, reshard: bool | int | None) -> None:
    if isinstance(parameter, DTensor) and reshard is not None and not isinstance(reshard, bool):
        raise NotImplementedError(
            f"reshard_after_forward={reshard}: expected True or False where parameters are DTensors already, "
            f"as {name!r} is"
        )


def _keep_sharded_in_state_dicts(param_groups: Iterable[FSDPParamGroup]) -> None:
    for group in param_groups:

        def reshard(*_: Any, group: FSDPParamGroup = group) -> None:
            group.reshard()

        for module in {location.module for p in group.parameters for location in p.locations}:
            module.register_state_dict_pre_hook(reshard)
            module.register_load_state_dict_pre_hook(reshard)
