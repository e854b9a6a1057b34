"""Shared by the engines with FSDP2's interface: applies a plan, and controls its units."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardproof.engine.contract import (
    Buffers,
    Capability,
    ComposableApi,
    Layout,
    NoGradient,
    Offload,
    Placement,
    Plan,
    PreparedModel,
    Reshard,
    Roots,
    UnitDtypes,
    UnitHandle,
    Wire,
)

_RESHARD: Mapping[Reshard, bool | int | None] = {
    Reshard.NATIVE: None,
    Reshard.AFTER_FORWARD: True,
    Reshard.KEEP: False,
    Reshard.TO_PAIRS: 2,
}


class ComposableUnit(UnitHandle):
    """One group of modules, controlled by the methods of its first module."""

    def __init__(self, modules: tuple[Any, ...], api: ComposableApi) -> None:
        self._modules = modules
        self._first = modules[0]
        self._api = api

    def unshard(self) -> None:
        self._first.unshard()

    def unshard_async(self) -> Callable[[], None]:
        wait: Callable[[], None] = self._first.unshard(async_op=True).wait
        return wait

    def reshard(self) -> None:
        self._first.reshard()

    def is_unsharded(self) -> bool:
        """Read the registered parameters: whole ones are no DTensors, or cut over axes that are not of data."""
        meshes = (p.device_mesh for p in self._own_parameters() if isinstance(p, DTensor))
        return all(not {"data", "shard"} & set(mesh.mesh_dim_names or ("data",)) for mesh in meshes)

    def set_gradient_sync(self, *, is_on: bool) -> None:
        """Set the flag of this group only."""
        self._first.set_requires_gradient_sync(is_on, recurse=False)

    def set_replica_sync(self, *, is_on: bool) -> None:
        """Set the flag of this group only."""
        self._first.set_requires_all_reduce(is_on, recurse=False)

    def set_last_backward(self, *, is_last: bool) -> None:
        """Set the flag, which the whole tree shares."""
        self._first.set_is_last_backward(is_last)

    def set_reshard_after_forward(self, *, is_on: bool) -> None:
        """Set the flag of this group only."""
        self._first.set_reshard_after_forward(is_on, recurse=False)

    def set_reshard_after_backward(self, *, is_on: bool) -> None:
        """Set the flag of this group only."""
        self._first.set_reshard_after_backward(is_on, recurse=False)

    def _own_parameters(self) -> Iterator[nn.Parameter]:
        for module in self._modules:
            inner = {m for m in module.modules() if m is not module and self._is_unit(m)}
            below = {p for m in inner for p in m.parameters()}
            yield from (p for p in module.parameters() if p not in below)

    def _is_unit(self, module: nn.Module) -> bool:
        return isinstance(module, self._api.sharded_module)


class PreparedComposable(PreparedModel):
    """Modules keep their names; parameters are DTensors."""

    unit_type: ClassVar[type[ComposableUnit]] = ComposableUnit

    def __init__(self, module: nn.Module, plan: Plan, api: ComposableApi) -> None:
        super().__init__(module)
        self.plan = plan
        self.api = api
        if Capability.RANK_DEPENDENT in plan.demands:
            # `set_reduce_scatter_unused_params` guarantees this even if no rank has a gradient.
            self.no_gradient = NoGradient.ZEROS

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Keep gradients local by a flag; DDP has a context instead."""
        self._set_gradient_sync(is_on=False)
        try:
            yield
        finally:
            self._set_gradient_sync(is_on=True)

    def composable(self) -> ComposableApi:
        """Return the API that prepared this model."""
        return self.api

    def units(self) -> Mapping[str, UnitHandle]:
        """Return the groups of the plan, with the root unless each unit is a root of its own."""
        names = self.plan.units if self.plan.roots is Roots.EACH_UNIT else (*self.plan.units, "")
        return {name: self.unit_type(members(self.module, name), self.api) for name in names}

    def step(self) -> None:
        """Update the parameters; then record an event if the plan demands it."""
        super().step()
        if Capability.STEP_EVENT in self.plan.demands:
            device = next(self.module.parameters()).device
            # Not torch.Event, which does not support the CPU in 2.13. Any: torch has a type of event for each device.
            event: Any = torch.get_device_module(device.type).Event()
            event.record()
            self._root().set_post_optim_event(event)

    def recover(self) -> None:
        """Reset each root after an interrupted forward or backward."""
        for root in self._roots():
            root.reset_iter_state()

    def _root(self) -> Any:
        return self.module

    def _set_gradient_sync(self, *, is_on: bool) -> None:
        for root in self._roots():
            root.set_requires_gradient_sync(is_on)

    def _roots(self) -> Iterator[Any]:
        if self.plan.roots is Roots.MODEL:
            yield self._root()
        else:
            yield from (members(self.module, unit)[0] for unit in self.plan.units)


def members(model: nn.Module, unit: str) -> tuple[nn.Module, ...]:
    """Return the modules that form one unit of a plan."""
    return tuple(model.get_submodule(name) for name in unit.split(","))


DECIDED_BY: Mapping[str, frozenset[Capability]] = {
    "reshard_after_forward": frozenset({Capability.RESHARD_POLICY, Capability.RESHARD_PART}),
    "mp_policy": frozenset({Capability.COMPUTE_DTYPE, Capability.REDUCE_DTYPE, Capability.UNIT_DTYPES}),
    "offload_policy": frozenset({Capability.CPU_OFFLOAD}),
    "shard_placement_fn": frozenset({Capability.SHARD_DIM, Capability.EXPERTS}),
}
"""The capabilities that options of ``fully_shard`` and ``replicate`` take from a plan."""


# Any: options of the user's are any values.
def apply_plan(
    api: ComposableApi,
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    shape: Layout,
    call_options: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Prepare the model with the engine; ``shape`` decides which of the interface's two functions to call.

    ``call_options`` take the place of the plan's.
    """
    if shape is Layout.REPLICATE:
        plan.refuse_options_of_shards()
    ignored = {model.get_parameter(name) for name in plan.ignored}
    experts = {model.get_parameter(name) for name in plan.experts}
    options: dict[str, Any] = {
        "mesh": _all_ranks(mesh) if experts else mesh,
        "ignored_params": ignored,
    }
    if plan.offload is not Offload.NONE:
        options["offload_policy"] = api.cpu_offload(pin_memory=plan.offload is Offload.PINNED)
    of_shards: dict[str, Any] = {}
    if shape is not Layout.REPLICATE:
        of_shards["reshard_after_forward"] = _RESHARD[plan.reshard]
        of_shards["shard_placement_fn"] = _largest_dim if plan.placement is Placement.LARGEST else None
    if experts:
        apart = api.placed_on(mesh["data"])
        of_shards["shard_placement_fn"] = lambda parameter: apart if parameter in experts else None
    for unit in (*plan.units, *([""] if plan.roots is Roots.MODEL else [])):
        modules = members(model, unit)
        policy = _precision(api, plan, unit)
        is_replicated = shape is Layout.REPLICATE or unit in plan.replicated
        apply, own = (api.replicate, {}) if is_replicated else (api.fully_shard, of_shards)
        asked = {"mp_policy": policy, **options, **own, **call_options}
        apply(modules[0] if len(modules) == 1 else list(modules), **asked)
    if plan.roots is Roots.EACH_UNIT:
        api.share_comm_ctx([_first(model, unit) for unit in plan.units])
    num_shards = 1 if shape is Layout.REPLICATE else mesh.size(mesh.ndim - 1)
    _set_options(api, model, plan, num_shards)


def _all_ranks(mesh: DeviceMesh) -> DeviceMesh:
    """Return a 1-D mesh over all ranks of a mesh of several axes, which are all ranks of the world."""
    return init_device_mesh(mesh.device_type, (mesh.size(),), mesh_dim_names=("all",))


def _precision(api: ComposableApi, plan: Plan, unit: str) -> Any:
    default = UnitDtypes(unit=unit, compute_dtype=plan.compute_dtype, output_dtype=plan.output_dtype)
    own = next((dtypes for dtypes in plan.unit_dtypes if dtypes.unit == unit), default)
    return api.mixed_precision(
        param_dtype=own.compute_dtype,
        reduce_dtype=plan.reduce_dtype,
        output_dtype=own.output_dtype,
        cast_forward_inputs=own.casts_inputs,
    )


def _largest_dim(parameter: nn.Parameter) -> Shard:
    return Shard(max(range(parameter.dim()), key=lambda dim: parameter.shape[dim]))


def _set_options(api: ComposableApi, model: nn.Module, plan: Plan, num_shards: int) -> None:
    """Call the setters; most of them affect one module each."""
    managed = [module for module in model.modules() if isinstance(module, api.sharded_module)]
    whole = [_first(model, unit) for unit in plan.replicated]
    for module in managed:
        if plan.buffers is Buffers.GROUP:
            module.set_allocate_memory_from_process_group_for_comm(True)
        if plan.buffers is Buffers.SYMMETRIC:
            module.set_symm_mem_for_comm()
        if plan.wire is Wire.SUM:
            module.set_force_sum_reduction_for_comms(True)
        if plan.divide_factor is not None:
            api.set_divide_factor(module, plan.divide_factor, 1 if module in whole else num_shards)
        if Capability.RANK_DEPENDENT in plan.demands:
            module.set_reduce_scatter_unused_params(True, recurse=False)
        if plan.max_reduce_buffers is not None:
            module.set_reduce_scatter_max_input_buffers(plan.max_reduce_buffers, recurse=False)
    for unit in plan.gathered_once:
        _first(model, unit).set_unshard_in_backward(False)
    if plan.prefetch is not None:
        for unit, targets in plan.prefetch.forward:
            _first(model, unit).set_modules_to_forward_prefetch([_first(model, t) for t in targets])
        for unit, targets in plan.prefetch.backward:
            _first(model, unit).set_modules_to_backward_prefetch([_first(model, t) for t in targets])
    for path, method in plan.forward_methods:
        api.register_forward_method(model.get_submodule(path), method)


def _first(model: nn.Module, unit: str) -> Any:
    return members(model, unit)[0]
