"""Gradient clipping by a norm over all ranks, and loss scaling."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler
from torch.distributed.tensor import DTensor, Replicate

from shardproof.engine.reference.parameter import sharded_param_of

_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ adds the same to its divisor


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients in place so that their joint norm is at most ``max_norm``; return the norm before.

    The norm (0-dim, plain, equal on every rank) is that of the whole gradients: each shard counts, and a replica
    counts once. Parameters may lie on different meshes. Plain tensors count as replicated, and a gathered parameter
    stands for its shard. Collective over the sharded axes of every mesh that occurs, whether or not a rank has
    gradients.

    ``foreach`` is accepted for compatibility with torch.nn.utils.clip_grad_norm_ and has no effect.

    Raises ValueError for a negative order; RuntimeError, on every rank, if the norm is not finite and
    ``error_if_nonfinite``.
    """
    if norm_type < 0:
        raise ValueError(f"clip_grad_norm_: expected norm_type >= 0 or inf, got {norm_type}")
    given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    chosen = [sharded_param_of(parameter) for parameter in given]
    gradients = [p.grad for p in chosen if p.grad is not None]
    total = _norm(chosen, float(norm_type))
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"clip_grad_norm_: expected a finite norm of order {norm_type}, got {total.item()}; "
            "look for the gradient that overflowed, or pass error_if_nonfinite=False"
        )
    scale = clip_scale(max_norm, total)
    for gradient in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.mul_(scale.to(device=local.device, dtype=local.dtype))
    return total


def clip_scale(max_norm: float, total: torch.Tensor) -> torch.Tensor:
    """Return the factor for gradients of that norm, by torch.nn.utils.clip_grad_norm_'s formula."""
    return torch.clamp(max_norm / (total + _EPSILON), max=1.0)


Spread = tuple[dist.ProcessGroup, ...]
"""The groups of ranks that a tensor is sharded over; none if every rank has the whole tensor."""


def _norm(parameters: list[torch.Tensor], order: float) -> torch.Tensor:
    by_spread: dict[Spread, list[torch.Tensor]] = {}
    # At least float32: every term of a sum of bfloat16 squares has a rounding error of a tenth of a percent. Read
    # it from the parameters, which all ranks have; gradients may be missing on some.
    dtype = real_dtype(parameters, torch.float32)
    for parameter in parameters:
        gradients = by_spread.setdefault(_spread(parameter), [])
        if parameter.grad is not None:
            gradient = parameter.grad
            gradients.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    device = next((p.device for p in parameters), torch.device("cpu"))
    return norm_over(by_spread, order, device, dtype)


def real_dtype(tensors: Iterable[torch.Tensor], *at_least: torch.dtype) -> torch.dtype:
    """Return the dtype to which those of all tensors promote, complex ones as those of their parts."""
    return functools.reduce(torch.promote_types, (*at_least, *(t.dtype.to_real() for t in tensors)))


def norm_over(
    gradients: Mapping[Spread, Sequence[torch.Tensor]], order: float, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Return the joint norm (0-dim, of ``dtype``, on ``device``) of local gradients, grouped by their spread.

    Starts with the gradients that are spread over the most axes: combines their norms over the innermost axis, then
    with the norms of gradients spread over the other axes, and so on, with one collective for each axis.
    """
    totals = {
        spread: _joined([_local_norm(local, order, dtype) for local in locals_], order, device, dtype)
        for spread, locals_ in gradients.items()
    }
    while spread := max(totals, key=len, default=()):
        norms = [_over_ranks(totals.pop(spread), spread[-1], order)]
        norms += [totals[spread[:-1]]] if spread[:-1] in totals else []
        totals[spread[:-1]] = _joined(norms, order, device, dtype)
    return totals.get((), torch.zeros((), dtype=dtype, device=device))


def _spread(parameter: torch.Tensor) -> Spread:
    if not isinstance(parameter, DTensor):
        return ()
    for placement in parameter.placements:
        if placement.is_partial():
            raise ValueError(
                f"clip_grad_norm_: expected sharded or replicated parameters, got {placement} "
                f"for one of shape {tuple(parameter.shape)}"
            )
    axes = (i for i, placement in enumerate(parameter.placements) if not isinstance(placement, Replicate))
    return tuple(parameter.device_mesh.get_group(axis) for axis in axes)


def _local_norm(local: torch.Tensor, order: float, dtype: torch.dtype) -> torch.Tensor:
    if not local.numel():
        return torch.zeros((), dtype=dtype, device=local.device)
    sizes = local.abs() if local.is_complex() else local
    norm: torch.Tensor = torch.linalg.vector_norm(sizes, order, dtype=dtype)
    return norm


def _joined(
    norms: list[torch.Tensor], order: float, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Return the norm of a vector from the norms of its parts; of order 0, counts add up."""
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    stacked = torch.stack([n.to(device) for n in norms])
    return stacked.sum() if order == 0 else torch.linalg.vector_norm(stacked, order)


def _over_ranks(norm: torch.Tensor, group: dist.ProcessGroup, order: float) -> torch.Tensor:
    if group.size() == 1:
        return norm
    if math.isinf(order):
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
        return norm
    power = norm if order == 0 else norm.pow(order)
    dist.all_reduce(power, group=group)
    return power if order == 0 else power.pow(1.0 / order)


class GradScaler(TorchGradScaler):
    """torch's scaler, except that gradients on the host are unscaled with what has arrived there, and all ranks agree.

    Torch copies the factor and the flag of an overflow to the host without a wait, so that it may unscale by a factor
    that has not arrived, and the flag's first value may arrive after an overflow was found (pytorch#176429). It
    combines the flag over the axes over which the first gradient is sharded, whatever those of others are.
    """

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        arrived = _arrived(optimizer, inv_scale, found_inf)
        found = super()._unscale_grads_(optimizer, *arrived, allow_fp16)
        for group in _not_combined(optimizer):
            for has_overflowed in found.values():
                dist.all_reduce(has_overflowed, op=dist.ReduceOp.MAX, group=group)
        return found


def _not_combined(optimizer: torch.optim.Optimizer) -> list[dist.ProcessGroup]:
    """Return the groups over which some gradients are sharded, and not the first one of each device and dtype."""
    all_groups: dict[dist.ProcessGroup, None] = {}
    of_firsts: dict[tuple[torch.device, torch.dtype], set[dist.ProcessGroup]] = {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            groups = _groups_of_shards(gradient)
            all_groups |= dict.fromkeys(groups)
            of_firsts.setdefault((gradient.device, gradient.dtype), set(groups))
    combined = set.intersection(*of_firsts.values()) if of_firsts else set()
    return [group for group in all_groups if group not in combined and group.size() > 1]


def _groups_of_shards(tensor: DTensor) -> list[dist.ProcessGroup]:
    # Not `is_shard`: it is false where two axes of the mesh cut the same dim.
    axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    return [tensor.device_mesh.get_group(axis) for axis in axes]


def _arrived(
    optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both on the host, after a wait, if the optimizer has gradients there."""
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
    if any(gradient is not None and gradient.is_cpu for gradient in gradients):
        return inv_scale.cpu(), found_inf.cpu()
    return inv_scale, found_inf


class ShardedGradScaler(TorchShardedGradScaler):
    """torch's sharded scaler, except that all ranks agree whether gradients are finite, on every way to a step.

    It needs one collective over ``process_group`` (None: all ranks) for each optimizer and step. A rank without
    gradients, or with gradients on other devices than its peers', takes part too.
    """

    # Not the sharded scaler's method: it communicates here, but fused optimizers and others never call it.
    unscale_ = TorchGradScaler.unscale_

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale as torch does, then agree over ranks. All of torch's ways to a step call this method.

        Fused optimizers do too: they unscale by themselves and only read the found infs. Gradients in half precision
        are allowed, because shards may have that dtype.
        """
        device = found_inf.device
        inv_scale, found_inf = _arrived(optimizer, inv_scale, found_inf)
        found = super(TorchShardedGradScaler, self)._unscale_grads_(optimizer, inv_scale, found_inf, True)
        return self._agreed(found, device)

    def _agreed(
        self, found: dict[torch.device, torch.Tensor], device: torch.device
    ) -> dict[torch.device, torch.Tensor]:
        """Return the found infs of all devices and ranks for each device of ``found``, or for ``device`` if empty.

        The call waits for the result, so that other devices never get a copy of the rank's own value, as they once did
        (pytorch#115710).
        """
        if device.type == "cpu" and self._device != "cpu":
            device = torch.device(self._device)  # the accelerator's group may support no other device
        anywhere = torch.zeros((), device=device)
        for by_device in found.values():
            anywhere = torch.maximum(anywhere, by_device.to(device))
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=self.process_group)
        for by_device in found.values():
            by_device.copy_(anywhere)
        return found or {device: anywhere}
