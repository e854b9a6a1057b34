"""Mutants whose ranks scale gradients against overflow, each for itself."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from engine.adapters.torch_fsdp1 import NAMES, FullyShardedDataParallelEngine

__all__ = ["ScalesAlone"]


class _LonelyScaler(ShardedGradScaler):
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale as a scaler does that has no peers."""
        GradScaler.unscale_(self, optimizer)


class ScalesAlone(FullyShardedDataParallelEngine):
    """A rank that sees an infinite gradient skips the step and lowers its scale, the others do neither.

    After pytorch/pytorch#115710: what a rank had found was read before it was exchanged.
    """

    name = "mutant.ScalesAlone"
    names = replace(NAMES, ShardedGradScaler=_LonelyScaler)
