"""ShardedGradScaler: one rank's infinite gradient is everybody's."""

from __future__ import annotations

import torch

from fixtures.tower import Tower, rows
from shardproof import InterfaceBench
from suites.wrapper.exercises.wrapped import wrap

__all__ = ["skips_together"]


def skips_together(bench: InterfaceBench, is_last: bool) -> None:
    """Make the gradients of one rank infinite, the first or the last, and then take an honest step."""
    root = wrap(bench, Tower())
    optimizer = torch.optim.SGD(root.parameters(), lr=2.0**-6)
    scaler = bench.names.ShardedGradScaler(bench.device.type, init_scale=8.0, growth_interval=1)
    before = [p.detach().clone() for p in root.parameters()]
    for moment, is_infinite in (("after an infinite gradient", True), ("after finite gradients", False)):
        scaler.scale(root(rows(bench.rank).to(bench.device)).sum()).backward()
        if is_infinite and bench.rank == (bench.size - 1 if is_last else 0):
            for gradient in (p.grad for p in root.parameters() if p.grad is not None):
                gradient.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = any(not torch.equal(p, q) for p, q in zip(root.parameters(), before, strict=True))
        bench.note(moment, f"{'moved' if moved else 'still'}, scale {scaler.get_scale()}")
