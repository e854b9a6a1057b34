"""A gradient scaler whose ranks skip steps and change the scale together, whatever each one saw of the gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

__all__ = ["ShardedGradScaler"]


class ShardedGradScaler(GradScaler):
    """A ``torch.amp.GradScaler`` for gradients of which every rank holds a part.

    Whether they are finite is asked of all ranks of ``process_group`` (None: of all there are), in one
    collective for each optimizer and step: a rank without any gradient, or with gradients on other devices
    than its peers', takes part like the rest.
    """

    # The order of torch's own sharded scaler, in which the factors have changed places with its base's.
    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(
            device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.process_group = process_group

    # Any: torch overloads this by what is given, and what is given comes back.
    def scale(self, outputs: Any) -> Any:
        """Multiply losses by the scale, each in its own dtype: one in half precision would come back wider."""
        if not self.is_enabled():
            return outputs
        if isinstance(outputs, torch.Tensor):
            return super().scale(outputs).to(outputs.dtype)
        if not isinstance(outputs, Iterable):
            raise ValueError(
                f"ShardedGradScaler.scale: expected a tensor or an iterable of tensors, got {outputs!r}"
            )
        scaled = map(self.scale, outputs)
        return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale as torch does, then agree. All of torch's ways to a step lead through here.

        One of them is that of fused optimizers, which unscale by themselves and only ask what was found; torch
        2.13's own sharded scaler asks no other rank for them, and lets ranks part.
        Gradients in half precision are allowed, for shards may be kept so.
        """
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
        return self._agreed(found, found_inf.device)

    def _agreed(
        self, found: dict[torch.device, torch.Tensor], device: torch.device
    ) -> dict[torch.device, torch.Tensor]:
        """Give what any device of any rank found for each of ``found``, or for ``device`` where there is none.

        The call returns when the result is there, so what is copied to other devices is never the rank's own
        finding, as it once was (pytorch#115710).
        """
        if device.type == "cpu" and self._device != "cpu":
            device = torch.device(self._device)  # of the accelerator's group, which may know no other
        anywhere = torch.zeros((), device=device)
        for by_device in found.values():
            anywhere = torch.maximum(anywhere, by_device.to(device))
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=self.process_group)
        for by_device in found.values():
            by_device.copy_(anywhere)
        return found or {device: anywhere}
