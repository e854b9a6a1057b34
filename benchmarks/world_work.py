"""The work whose cost `world_cost` compares: build a model, wrap it, train two steps."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardproof.harness.worlds.rank import RankContext


def train_two_steps() -> None:
    """The work of the case: build, wrap, train, reduce."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def body(context: RankContext) -> None:
    train_two_steps()


def timed_body(context: RankContext) -> float:
    """Do the work; returns the seconds of the processor that this process has used."""
    body(context)
    return time.process_time()
