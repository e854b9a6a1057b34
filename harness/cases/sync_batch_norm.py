"""Batch normalisation over the rows of all ranks for tensors on a CPU, where torch's SyncBatchNorm refuses to run."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as torch's documentation names it
from torch import nn


class BatchNormOverRanks(nn.BatchNorm1d):
    """Computes what `torch.nn.SyncBatchNorm` does, by sums over all ranks that autograd differentiates.

    No SyncBatchNorm itself: DDP refuses one on a CPU.
    """

    process_group: dist.ProcessGroup | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.device.type != "cpu":
            return nn.SyncBatchNorm.forward(self, input)  # type: ignore[arg-type]  # it has the same attributes
        is_own = self.training or not self.track_running_stats
        if not (is_own and dist.is_initialized()):
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, is_own, 0.0, self.eps
            )
        num_rows = input.new_tensor([input.numel() // input.size(1)])
        totals = self._total(torch.cat([self._sums(input), num_rows]))
        count, mean = totals[-1].detach(), totals[:-1] / totals[-1].detach()
        centred = input - self._shaped(mean, input)
        variance = self._total(self._sums(centred.square())) / count
        self._track(mean.detach(), variance.detach() * count / (count - 1))
        normed = centred * self._shaped((variance + self.eps).rsqrt(), input)
        if not self.affine:
            return normed
        return normed * self._shaped(self.weight, input) + self._shaped(self.bias, input)

    def _total(self, value: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = _SumOverRanks.apply(value, self.process_group)  # type: ignore[no-untyped-call]  # of torch's
        return total

    @staticmethod
    def _sums(value: torch.Tensor) -> torch.Tensor:
        return value.sum([dim for dim in range(value.dim()) if dim != 1])

    @staticmethod
    def _shaped(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return value.view(1, -1, *[1] * (like.dim() - 2))

    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


class _SumOverRanks(torch.autograd.Function):
    """The sum over all ranks: each rank's loss depends on each rank's value."""

    # Any: torch's context of a function.
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group, total = group, value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def with_sync_batch_norm(model: nn.Module) -> nn.Module:
    """Let a model's SyncBatchNorm modules run on a CPU too; returns the model."""
    for module in model.modules():
        if type(module) is nn.SyncBatchNorm:
            module.__class__ = BatchNormOverRanks  # type: ignore[assignment]  # its attributes are the same
    return model
