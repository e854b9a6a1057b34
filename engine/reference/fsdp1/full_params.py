"""Whole parameters for callers: gathers them, registers them under their own names, writes them back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from shardproof.engine.reference.collectives import DefaultAllGather
from shardproof.engine.reference.fsdp1.flat import FLAT_NAME, FlatLayout
from shardproof.engine.reference.fsdp1.init import WrapperBase, wrappers_in
from shardproof.engine.reference.geometry import local_part
from shardproof.engine.reference.param_group import FSDPParamGroup

PREFIX = "_fsdp_wrapped_module."
"""The prefix that a wrapper adds to the names of everything inside the wrapped module."""

_CHECKPOINT_PREFIX = (
    "_checkpoint_wrapped_module."  # the prefix of torch's wrapper for activation checkpointing
)


def clean_name(name: str) -> str:
    """Return a name without the prefixes of wrappers."""
    return name.replace(PREFIX, "").replace(_CHECKPOINT_PREFIX, "")


def name_in(path: str, name: str) -> str:
    """Return the original name of ``name`` in the module at ``path``, which may be the root."""
    return clean_name(f"{path}.{name}" if path else name)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullParamsOptions:
    """Options for whole parameters.

    ``writeback``: values written to them persist, and each rank keeps its share. ``rank0_only``: the other ranks of the
    shard group keep their shares registered. ``offloads``: whole parameters are on the host. ``with_grads``: gradients
    are whole too, where a parameter has one.
    """

    writeback: bool = False
    rank0_only: bool = False
    offloads: bool = False
    with_grads: bool = False


def layout_of(group: FSDPParamGroup) -> FlatLayout:
    """Return the layout of a wrapper's group."""
    assert isinstance(group.layout, FlatLayout)
    return group.layout


def gathered(share: torch.Tensor, group: FSDPParamGroup) -> torch.Tensor:
    """Gather the ranks' equal 1-D shares in rank order; with one rank, return the share itself. Collective."""
    ranks = group.mesh.shard_size
    if ranks == 1 or group.mesh.shard_group is None:
        return share
    local = share.to(group.device)
    whole = local.new_empty(ranks * local.numel())
    if local.numel():
        DefaultAllGather()(whole, local.contiguous(), group.mesh.shard_group)
    return whole


@contextmanager
@torch.no_grad()
def unsharded_params(group: FSDPParamGroup, how: FullParamsOptions) -> Iterator[bool]:
    """Register the whole parameters of ``group`` in the modules; yields whether this rank does so. Collective.

    If one rank has everything, these are the parameters' own memory, and writes always persist.
    """
    group.reshard()
    group.reset_sharded_params()
    flat = layout_of(group)
    before = flat.memory.clone() if how.writeback and group.mesh.shard_size > 1 else None
    whole = gathered(flat.memory, group)
    gradients = gathered(_gradients(flat), group) if how.with_grads else None
    if how.rank0_only and flat.rank:
        yield False
        return
    if how.offloads:
        whole = whole.cpu()
    shown = _show(flat, whole, gradients)
    if flat.flat_parameter is not None and flat.holder is not None:
        del flat.holder._parameters[FLAT_NAME]
    try:
        with torch.enable_grad():
            yield True
    finally:
        if flat.flat_parameter is not None and flat.holder is not None:
            flat.holder._parameters[FLAT_NAME] = flat.flat_parameter
        is_written = before is not None and not torch.equal(before, flat.memory)
        if how.writeback:
            _write_back(flat, whole, shown, gradients)
        for piece in flat.parameters:
            piece.to_sharded()
        group.mark_stale()
        if is_written:
            raise RuntimeError(
                f"summon_full_params: expected writes to the parameters that modules show inside, got some to this "
                f"rank's part of {[p.name for p in flat.parameters]}, which writing back would undo; "
                "take parameters from the module inside the context"
            )


def _show(flat: FlatLayout, whole: torch.Tensor, gradients: torch.Tensor | None) -> list[nn.Parameter]:
    shown = []
    for piece in flat.parameters:
        span = slice(piece.start, piece.start + piece.shape.numel())
        shown_whole = piece.laid_out(whole[span].view(piece.shape))
        parameter = nn.Parameter(shown_whole, piece.sharded_param.requires_grad)
        if gradients is not None and piece.sharded_param.grad is not None:
            parameter.grad = piece.laid_out(gradients[span].view(piece.shape))
        piece.show_whole(parameter)
        shown.append(parameter)
    return shown


def _write_back(
    flat: FlatLayout, whole: torch.Tensor, shown: list[nn.Parameter], gradients: torch.Tensor | None
) -> None:
    """Keep this rank's share of the registered parameters, including those that replaced others."""
    for piece, parameter in zip(flat.parameters, shown, strict=True):
        found = piece.locations[0].get()
        own, shown_own = (None if p is None else local_part(p) for p in (found, parameter))
        is_other = own is not None and shown_own is not None and own.data_ptr() != shown_own.data_ptr()
        if own is not None and is_other and own.shape == piece.shape:
            whole[piece.start : piece.start + own.numel()].copy_(own.reshape(-1))
    if flat.num_ranks > 1 or whole.device != flat.memory.device:
        flat.memory.copy_(flat.share_of(whole))
    if gradients is None:
        return
    for piece, parameter in zip(flat.parameters, shown, strict=True):
        if piece.sharded_param.grad is not None and parameter.grad is not None:
            local = piece.own_part(parameter.grad).reshape(-1)[piece.first : piece.first + piece.local_numel]
            piece.sharded_param.grad.copy_(local.view(piece.sharded_param.grad.shape))


def _gradients(flat: FlatLayout) -> torch.Tensor:
    """Lay the visible parameters' gradients out like the share; zeros where there is none."""
    if flat.flat_parameter is not None:
        grad = flat.flat_parameter.grad
        return torch.zeros_like(flat.memory) if grad is None else grad
    share = torch.zeros_like(flat.memory)
    for piece in flat.parameters:
        if piece.sharded_param.grad is not None:
            share[piece.offset : piece.offset + piece.local_numel].copy_(piece.sharded_param.grad.reshape(-1))
    return share


@contextmanager
def summon_full_params(wrappers: Sequence[WrapperBase], how: FullParamsOptions) -> Iterator[None]:
    """Register the whole parameters of these wrappers in their modules. Collective.

    Raises NotImplementedError for options that exclude each other, AssertionError in forward or backward, or if the
    parameters of a wrapper are whole already.
    """
    for wrapper in wrappers:
        _check(wrapper, how)
    with ExitStack() as shown:
        for wrapper in wrappers:
            wrapper.is_summoned = True
            shown.callback(setattr, wrapper, "is_summoned", False)
            for group in wrapper.groups:
                shown.enter_context(unsharded_params(group, how))
        yield


def _check(wrapper: WrapperBase, how: FullParamsOptions) -> None:
    if how.with_grads and (how.offloads or wrapper.is_flat):
        raise NotImplementedError(
            "summon_full_params: expected use_orig_params=True and offload_to_cpu=False beside with_grads=True, got "
            f"with_grads={how.with_grads}, use_orig_params={not wrapper.is_flat}, offload_to_cpu={how.offloads}"
        )
    if how.offloads and any(group.mesh.shard_group is None for group in wrapper.groups):
        raise NotImplementedError(
            "summon_full_params: expected sharded parameters beside offload_to_cpu=True, got NO_SHARD; "
            "copy the parameters"
        )
    if how.writeback and how.rank0_only:
        raise NotImplementedError(
            "summon_full_params: expected writeback=False beside rank0_only=True, got both: "
            "what other ranks hold would not follow"
        )
    if wrapper.is_running:
        raise AssertionError(
            "summon_full_params: Cannot manually unshard parameters during forward/backward; "
            "call it between iterations"
        )
    if wrapper.is_summoned:
        raise AssertionError(
            "summon_full_params: Cannot manually unshard parameters when already unsharding parameters; "
            "leave the outer context first"
        )


def cast_buffers(root: WrapperBase) -> None:
    """Cast the floating-point buffers of every wrapper in ``root`` to that wrapper's buffer dtype."""
    for wrapper in wrappers_in(root):
        dtype = wrapper.mixed_precision.buffer_dtype
        for module in own_modules(wrapper) if dtype is not None else ():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                    wrapper.buffer_dtypes[module, name] = buffer.dtype
                    module._buffers[name] = buffer.to(dtype)


def own_modules(wrapper: WrapperBase) -> Iterator[nn.Module]:
    """Yield the modules inside ``wrapper`` that are not inside a wrapper below, without ignored ones."""
    stack: list[nn.Module] = [wrapper.wrapped]
    seen = set(wrapper.ignored.modules)
    while stack:
        module = stack.pop()
        if module not in seen and not isinstance(module, WrapperBase):
            seen.add(module)
            yield module
            stack.extend(module.children())
