"""A gradient scaler of the wrapper's interface in action on several ranks, for cases to judge."""

from __future__ import annotations

import math

import torch
from torch import nn

from shardproof import InterfaceBench

AFTER_AN_INFINITE = "after an infinite gradient of one rank"
AFTER_NONE = "after a step in which one rank had no gradient"
AFTER_A_FINITE = "after finite gradients"


def scales_together(bench: InterfaceBench, is_fused: bool) -> None:
    """Step thrice: one rank's gradient is infinite, the last rank has none, all are finite.

    Gradients are like those of shards, on ranks that have one element each.
    """
    parameter = nn.Parameter(torch.zeros(1, device=bench.device))
    optimizer = torch.optim.SGD([parameter], lr=0.5, fused=is_fused)
    scaler = bench.prepared.wrapper().ShardedGradScaler(bench.device.type, init_scale=8.0, growth_interval=2)
    last = bench.size - 1
    for moment, value in (
        (AFTER_AN_INFINITE, math.inf if bench.rank == last else 1.0),
        (AFTER_NONE, None if bench.rank == 0 else 1.0),
        (AFTER_A_FINITE, 1.0),
    ):
        optimizer.zero_grad()
        scale = scaler.scale(torch.ones((), device=bench.device))
        if value is not None:
            parameter.grad = torch.full_like(parameter, value) * scale
        before = parameter.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        moved = float((before - parameter.detach()).sum())
        is_right = moved == (0.0 if value is None or moment == AFTER_AN_INFINITE else 0.5)
        bench.note(
            moment, f"{'as it should' if is_right else f'moved by {moved}'}, scale {scaler.get_scale()}"
        )
