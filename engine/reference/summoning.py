"""What is done to all wrappers of a model at once, between iterations: show whole parameters, clip, cast buffers."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from engine.reference.norm import Spread, clip_scale, norm_over
from engine.reference.parameter import is_promise
from engine.reference.whole import Showing, showing_whole
from engine.reference.wrapper_base import WrapperBase, wrappers_in

__all__ = ["cast_buffers", "clip_by_norm", "own_modules", "summoned"]


@contextmanager
def summoned(wrappers: Sequence[WrapperBase], how: Showing) -> Iterator[None]:
    """Have modules show the whole parameters of these wrappers. Collective.

    Raises NotImplementedError for what cannot be asked together, AssertionError in forward or backward, or when
    the parameters of one are whole already.
    """
    for wrapper in wrappers:
        _check(wrapper, how)
    with ExitStack() as shown:
        for wrapper in wrappers:
            wrapper.is_summoned = True
            shown.callback(setattr, wrapper, "is_summoned", False)
            for group in wrapper.groups:
                shown.enter_context(showing_whole(group, how))
        yield


def _check(wrapper: WrapperBase, how: Showing) -> None:
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


def clip_by_norm(root: WrapperBase, max_norm: float, order: float) -> torch.Tensor:
    """Clip gradients by the norm over everything in ``root``; see `FullyShardedDataParallel.clip_grad_norm_`.

    A gradient counts once: that of sharded parameters on every rank of the shard group, all others on this one.
    """
    by_spread: dict[Spread, list[torch.Tensor]] = {}
    managed: set[nn.Parameter] = set()
    for wrapper in wrappers_in(root):
        for group in wrapper.groups:
            shards = group.mesh.shard_group
            found = by_spread.setdefault((shards,) if shards is not None else (), [])
            owners = dict.fromkeys(parameter.owned for parameter in group.parameters)
            found += [owner.grad for owner in owners if owner.grad is not None]
            managed |= {*owners, *(p.unsharded for p in group.parameters if p.unsharded is not None)}
    rest = [p.grad for p in root.parameters() if p not in managed and p.grad is not None]
    if rest:
        by_spread.setdefault((), []).extend(rest)
    gradients = [gradient for found in by_spread.values() for gradient in found]
    wide = functools.reduce(torch.promote_types, (g.dtype for g in gradients), torch.float32)
    total = norm_over(by_spread, order, root.compute_device, wide)
    scale = clip_scale(max_norm, total)
    for gradient in gradients:
        if is_promise(gradient):
            continue  # zeros
        gradient.mul_(scale.to(device=gradient.device, dtype=gradient.dtype))
    if not gradients:
        warnings.warn(
            "Called FSDP.clip_grad_norm_() on a rank with no gradients -- returning the total norm in the default "
            f"dtype {total.dtype}",
            stacklevel=4,
        )
        return total
    return total.to(functools.reduce(torch.promote_types, (g.dtype for g in gradients)))


def cast_buffers(root: WrapperBase) -> None:
    """Cast the floating-point buffers of every wrapper in ``root`` to the dtype it was given for them."""
    for wrapper in wrappers_in(root):
        dtype = wrapper.mixed_precision.buffer_dtype
        for module in own_modules(wrapper) if dtype is not None else ():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                    wrapper.buffer_dtypes[module, name] = buffer.dtype
                    module._buffers[name] = buffer.to(dtype)


def own_modules(wrapper: WrapperBase) -> Iterator[nn.Module]:
    """Give the modules inside ``wrapper`` that are inside no wrapper below, ignored ones left out."""
    stack: list[nn.Module] = [wrapper.wrapped]
    seen = set(wrapper.ignored.modules)
    while stack:
        module = stack.pop()
        if module not in seen and not isinstance(module, WrapperBase):
            seen.add(module)
            yield module
            stack.extend(module.children())
