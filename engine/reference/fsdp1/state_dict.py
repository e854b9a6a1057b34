"""Model state dicts of wrappers: whole, sharded or local, under the names of the original model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardproof.engine.reference.fsdp1.flat import FLAT_NAME, FlatPiece
from shardproof.engine.reference.fsdp1.full_params import (
    PREFIX,
    FullParamsOptions,
    clean_name,
    layout_of,
    name_in,
    own_modules,
    unsharded_params,
)
from shardproof.engine.reference.fsdp1.init import WrapperBase, wrappers_in
from shardproof.engine.reference.param_group import FSDPParamGroup
from shardproof.engine.reference.torch_private import concatenated, local_tensor

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}


def default_settings() -> StateDictSettings:
    """Return the default settings: whole states on every rank."""
    return settings_for(StateDictType.FULL_STATE_DICT, None, None)


def settings_for(
    kind: StateDictType, model: StateDictConfig | None, optimizer: OptimStateDictConfig | None
) -> StateDictSettings:
    """Combine a type with configs of its own classes; raises RuntimeError for those of another type."""
    model_class, optimizer_class = _CONFIGS[kind]
    model = model_class() if model is None else model
    optimizer = optimizer_class() if optimizer is None else optimizer
    for config, expected in ((model, model_class), (optimizer, optimizer_class)):
        if type(config) is not expected:
            raise RuntimeError(
                f"set_state_dict_type: expected a {expected.__name__} for {kind}, got {type(config).__name__}"
            )
    return StateDictSettings(kind, model, optimizer)


def own_names(wrapper: WrapperBase) -> Iterator[tuple[str, FlatPiece]]:
    """Yield each name of each of the wrapper's own parameters, relative to the wrapped module."""
    paths = {module: name for name, module in wrapper.wrapped.named_modules()}
    for group in wrapper.groups:
        for piece in layout_of(group).parameters:
            for location in piece.locations:
                yield name_in(paths[location.module], location.name), piece


def named_pieces(model: nn.Module) -> Iterator[tuple[str, FSDPParamGroup, FlatPiece]]:
    """Yield every managed parameter of ``model`` once, wrapper by wrapper: its first name, its group and itself."""
    paths = {module: name for name, module in model.named_modules()}
    for wrapper in wrappers_in(model):
        names: dict[FlatPiece, str] = {}
        for name, piece in own_names(wrapper):
            names.setdefault(piece, name_in(paths[wrapper], name))
        for group in wrapper.groups:
            for piece in layout_of(group).parameters:
                yield names[piece], group, piece


def sharded_over(whole: torch.Tensor, group: FSDPParamGroup) -> DTensor:
    """Shard ``whole``, which every rank has, over the group's ranks on dim 0; scalars are replicated."""
    assert group.mesh.shard_group is not None
    if isinstance(whole, DTensor):
        if group.mesh.shard_mesh is None:
            raise ValueError(
                "state_dict: expected a device_mesh of the wrapper of tensors that other axes cut"
            )
        axes, lie = concatenated(group.mesh.shard_mesh, whole.device_mesh), whole.placements
        local, shape, stride = local_tensor(whole).detach().clone(), whole.shape, whole.stride()
        everywhere = DTensor.from_local(
            local, axes, [Replicate(), *lie], run_check=False, shape=shape, stride=stride
        )
        return everywhere.redistribute(placements=[Shard(0), *lie])
    mesh = DeviceMesh.from_group(group.mesh.shard_group, group.device.type)
    placement = Shard(0) if whole.dim() else Replicate()
    return distribute_tensor(whole.detach().clone(), mesh, [placement], src_data_rank=None)


# Saving ---------------------------------------------------------------------------------------------------


def export_states(
    wrapper: WrapperBase,
    save: Callable[..., Any],
    destination: dict[str, Any] | None,
    prefix: str,
    keep_vars: bool,
) -> dict[str, Any]:
    """Write the chosen form into ``destination``, by ``save`` (nn.Module.state_dict of the wrapper)."""
    settings, kind = wrapper.state_dict_settings, _kind(wrapper)
    if destination is None:
        made: Any = OrderedDict()
        made._metadata = OrderedDict()
        destination = made
    num_before = len(destination)
    with ExitStack() as shown:
        if kind is not StateDictType.LOCAL_STATE_DICT:
            how = FullParamsOptions(rank0_only=getattr(settings.state_dict_config, "rank0_only", False))
            for group in wrapper.groups:
                shown.enter_context(unsharded_params(group, how))
        save(destination=destination, prefix=prefix, keep_vars=keep_vars)
        _rename(destination, list(islice(destination, num_before, None)), f"{prefix}{PREFIX}", prefix)
        _restore_buffers(wrapper, destination, prefix)
        _EXPORTS[kind](wrapper, destination, prefix, keep_vars)
    return destination


def _rename(states: dict[str, Any], keys: list[str], old: str, new: str) -> None:
    """Replace a prefix, and keep the order."""
    for key in keys:
        name = f"{new}{key.removeprefix(old)}" if key.startswith(old) else key
        states[name] = states.pop(key)


def _restore_buffers(wrapper: WrapperBase, states: dict[str, Any], prefix: str) -> None:
    paths = {module: name for name, module in wrapper.wrapped.named_modules()}
    for (module, name), dtype in wrapper.buffer_dtypes.items():
        key = prefix + name_in(paths[module], name)
        if key in states:
            states[key] = states[key].to(dtype)


def _export_full(wrapper: WrapperBase, states: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    config = wrapper.state_dict_settings.state_dict_config
    if getattr(config, "rank0_only", False) and wrapper.process_group.rank():
        for key in _buffer_keys(wrapper, prefix):
            states.pop(key, None)
        for name, _ in own_names(wrapper):
            states.pop(prefix + name, None)
        states.pop(prefix + FLAT_NAME, None)
        return
    for name, _ in own_names(wrapper):
        value = states[prefix + name]
        if config.offload_to_cpu:
            states[prefix + name] = value.detach().to("cpu", copy=True)
        elif not keep_vars:
            states[prefix + name] = value.detach().clone()
    if config.offload_to_cpu:
        _move_buffers(wrapper, states, prefix)


def _buffer_keys(wrapper: WrapperBase, prefix: str) -> Iterator[str]:
    """Yield the state's names of the buffers whose nearest wrapper is this one."""
    paths = {module: name for name, module in wrapper.wrapped.named_modules()}
    for module in own_modules(wrapper):
        yield from (prefix + name_in(paths[module], name) for name in module._buffers)


def _move_buffers(wrapper: WrapperBase, states: dict[str, Any], prefix: str) -> None:
    for key in _buffer_keys(wrapper, prefix):
        if key in states:  # otherwise it is not persistent
            states[key] = states[key].cpu()


def _export_sharded(wrapper: WrapperBase, states: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    offloads = wrapper.state_dict_settings.state_dict_config.offload_to_cpu
    for group in wrapper.groups:
        for name, _ in own_names(wrapper):
            spread = sharded_over(states[prefix + name], group)
            states[prefix + name] = spread.cpu() if offloads else spread
    if offloads:
        _move_buffers(wrapper, states, prefix)


def _export_local(wrapper: WrapperBase, states: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    for name, _ in own_names(wrapper):
        states.pop(prefix + name, None)
    for group in wrapper.groups:
        # As a part of a DTensor: of plain tensors of one name, files would keep one rank's.
        assert group.mesh.shard_group is not None
        share = layout_of(group).memory.detach().clone()
        mesh = DeviceMesh.from_group(group.mesh.shard_group, share.device.type)
        states[prefix + FLAT_NAME] = DTensor.from_local(share, mesh, [Shard(0)], run_check=False)


_EXPORTS = {
    StateDictType.FULL_STATE_DICT: _export_full,
    StateDictType.SHARDED_STATE_DICT: _export_sharded,
    StateDictType.LOCAL_STATE_DICT: _export_local,
}


def _kind(wrapper: WrapperBase) -> StateDictType:
    """Return the chosen form; if every rank has everything, only the whole form exists."""
    if any(group.mesh.shard_group is None for group in wrapper.groups):
        return StateDictType.FULL_STATE_DICT
    return wrapper.state_dict_settings.state_dict_type


# Loading --------------------------------------------------------------------------------------------------


class Importer:
    """Loads state dicts into one wrapper: its hooks run before and after nn.Module loads the modules inside."""

    def __init__(self, wrapper: WrapperBase) -> None:
        self._shown = ExitStack()
        wrapper.register_load_state_dict_pre_hook(self.before)
        wrapper.register_load_state_dict_post_hook(self.after)

    def before(self, wrapper: WrapperBase, states: dict[str, Any], prefix: str, *_: object) -> None:
        """Register whole parameters, under the names by which nn.Module looks them up, for it to write to."""
        kind = _kind(wrapper)
        for group in wrapper.groups:
            if kind is StateDictType.LOCAL_STATE_DICT:
                group.reshard()
                _load_local(wrapper, group, states, prefix)
            else:
                self._shown.enter_context(unsharded_params(group, FullParamsOptions(writeback=True)))
        pieces = {prefix + name: piece for name, piece in own_names(wrapper)}
        for key, value in states.items():
            piece = pieces.get(key)
            if piece is not None and piece.inner is not None and kind is not StateDictType.LOCAL_STATE_DICT:
                states[key] = piece.laid_out(piece.own_part(value))
            elif isinstance(value, DTensor) and kind is not StateDictType.LOCAL_STATE_DICT:
                states[key] = value.full_tensor()
        keys = [key for key in states if key.startswith(prefix) and key != prefix + FLAT_NAME]
        _rename(states, keys, prefix, f"{prefix}{PREFIX}")

    def after(self, wrapper: nn.Module, incompatible: Any) -> None:
        """Keep this rank's share of the loaded values."""
        for keys in (incompatible.missing_keys, incompatible.unexpected_keys):
            keys[:] = [clean_name(key) for key in keys]
        self._shown.close()


def _load_local(wrapper: WrapperBase, group: FSDPParamGroup, states: dict[str, Any], prefix: str) -> None:
    key, flat = prefix + FLAT_NAME, layout_of(group)
    if key not in states:
        return  # nn.Module reports missing keys
    share = states[key]
    if isinstance(share, DTensor):
        states[key] = share = share.to_local()
    if share.shape != flat.memory.shape:
        raise RuntimeError(
            f"load_state_dict: expected {key!r} of shape {tuple(flat.memory.shape)}, as this rank holds, got "
            f"{tuple(share.shape)}; local states fit the wrapping and the world that they were saved from"
        )
    with torch.no_grad():
        flat.memory.copy_(share)
    group.mark_stale()
    if flat.flat_parameter is None:
        del states[key]
        for name, piece in own_names(wrapper):  # nn.Module must find the keys that it looks up
            states[prefix + name] = piece.local
