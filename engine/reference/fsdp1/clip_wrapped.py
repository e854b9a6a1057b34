"""Clips the gradients of a wrapped model by their joint norm."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from shardproof.engine.reference.fsdp1.init import WrapperBase, wrappers_in
from shardproof.engine.reference.optim import Spread, clip_scale, norm_over, real_dtype
from shardproof.engine.reference.param_group import FSDPParamGroup


def clip_by_norm(root: WrapperBase, max_norm: float, order: float) -> torch.Tensor:
    """Clip gradients by the norm over everything in ``root``; see `FullyShardedDataParallel.clip_grad_norm_`.

    A gradient counts once: that of a sharded parameter on every rank of the shard group, all others on this rank.
    Raises RuntimeError if some still accumulate on this rank, where the norm of their sum over ranks is not known.
    """
    by_spread: dict[Spread, list[torch.Tensor]] = {}
    managed: set[nn.Parameter] = set()
    for wrapper in wrappers_in(root):
        for group in wrapper.groups:
            if any(parameter.inner is not None for parameter in group.parameters):
                raise NotImplementedError(
                    "clip_grad_norm_: expected tensors that no other axis cuts, got DTensors; try fully_shard"
                )
            _check_reduced(group)
            shards = group.mesh.shard_group
            found = by_spread.setdefault((shards,) if shards is not None else (), [])
            owners = dict.fromkeys(parameter.sharded_param for parameter in group.parameters)
            found += [owner.grad for owner in owners if owner.grad is not None]
            managed |= {
                *owners,
                *(p.unsharded_param for p in group.parameters if p.unsharded_param is not None),
            }
    rest = [p.grad for p in root.parameters() if p.is_leaf and p not in managed and p.grad is not None]
    if rest:
        by_spread.setdefault((), []).extend(rest)
    gradients = [gradient for found in by_spread.values() for gradient in found]
    wide = real_dtype(gradients, torch.float32)
    total = norm_over(by_spread, order, root.compute_device, wide)
    scale = clip_scale(max_norm, total)
    for gradient in gradients:
        gradient.mul_(scale.to(device=gradient.device, dtype=gradient.dtype))
    if not gradients:
        warnings.warn(
            "Called FSDP.clip_grad_norm_() on a rank with no gradients -- returning the total norm in the default "
            f"dtype {total.dtype}",
            stacklevel=4,
        )
        return total
    return total.to(real_dtype(gradients))


def _check_reduced(group: FSDPParamGroup) -> None:
    # One that was cleared on the optimizer's parameter is dropped, and may be there still.
    held = [p.name for p in group.parameters if p.has_unsharded_grad and p.sharded_param.grad is not None]
    if held:
        raise RuntimeError(
            f"clip_grad_norm_: expected reduced gradients, got those of {held} while they accumulate in no_sync; "
            "clip after the backward that reduces"
        )
