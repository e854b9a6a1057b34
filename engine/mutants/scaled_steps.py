"""Mutants that unscale gradients wrongly, or skip steps that overflow wrongly."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor

from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from shardproof.engine.mutants.mutant import Trace, mutant


class _OfOwnShards(GradScaler):
    # Any: optimizers have no narrower type for their parameters.
    def _unscale_grads_(
        self, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        gradients = [
            p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        own = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        torch._amp_foreach_non_finite_check_and_unscale_(own, found_inf, inv_scale)
        return {found_inf.device: found_inf}


@mutant(after="facebookresearch/fairscale#179", trace=Trace.STATE)
class SkipsOverflowsAlone(FullyShardEngine):
    """A rank whose own shards are finite takes a step that others skip."""

    class Prepared(PreparedFullyShard):
        def grad_scaler(self, *, init_scale: float, growth_interval: int) -> GradScaler:
            return _OfOwnShards("cpu", init_scale=init_scale, growth_interval=growth_interval)


class _Growing(GradScaler):
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        if self._get_growth_tracker() + 1 == self.get_growth_interval():
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if parameter.grad is not None:
                    parameter.grad.div_(self.get_growth_factor())


@mutant(after="deepspeedai/DeepSpeed#8588")
class UnscalesByTheNextScale(DistributedDataParallelEngine):
    """Gradients are divided by the scale after the step, not by that of the losses."""

    class Prepared(PreparedDdp):
        def grad_scaler(self, *, init_scale: float, growth_interval: int) -> GradScaler:
            return _Growing("cpu", init_scale=init_scale, growth_interval=growth_interval)


@mutant(after="NVIDIA/apex#1512")
class ClipsAsIfStillScaled(DistributedDataParallelEngine):
    """Gradients that are already unscaled are clipped as if they were not."""

    class Prepared(PreparedDdp):
        _scaler: GradScaler | None = None

        def grad_scaler(self, *, init_scale: float, growth_interval: int) -> GradScaler:
            self._scaler = super().grad_scaler(init_scale=init_scale, growth_interval=growth_interval)
            return self._scaler

        def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
            scale = 1.0 if self._scaler is None else self._scaler.get_scale()
            return super().clip_grad_norm_(max_norm / scale, norm_type)
