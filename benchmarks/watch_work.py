"""The work whose cost `watch_overhead` compares: a step of training, under no watch and under each, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from shardproof.harness.cases.training import Watch
from shardproof.harness.training.watches import watching
from shardproof.harness.worlds.rank import RankContext


class _EmptyMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Does nothing, at each operator: the minimum cost of any watch in Python."""

    def __torch_dispatch__(
        self,
        func: Any,  # Any, for all: torch's own signature
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        return func(*args, **(kwargs or {}))


def _asked(*asked: Watch) -> Callable[[RankContext], AbstractContextManager[object]]:
    return lambda context: watching(frozenset(asked), context.recorder)


WATCHES: dict[str, Callable[[RankContext], AbstractContextManager[object]]] = {
    "plain": _asked(),
    "empty mode": lambda _: _EmptyMode(),  # type: ignore[no-untyped-call]
    "races": _asked(Watch.RACES),
    "lifetimes": _asked(Watch.LIFETIMES),
    "both": _asked(Watch.RACES, Watch.LIFETIMES),
}
_TIMED_STEPS = 3


def _model(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))


def _ddp(width: int) -> nn.Module:
    return DistributedDataParallel(_model(width))


def _fsdp2(width: int) -> nn.Module:
    model = _model(width)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model


WORK: dict[str, tuple[Callable[[int], nn.Module], int]] = {
    "ddp 3x64": (_ddp, 64),
    "fsdp2 3x64": (_fsdp2, 64),
    "fsdp2 3x512": (_fsdp2, 512),
}


def measure(context: RankContext, name: str, num_turns: int) -> dict[str, list[float]]:
    """Alternate: seconds of a step under each watch, one number for each turn; a rank's body."""
    build, width = WORK[name]
    taken: dict[str, list[float]] = {watch: [] for watch in WATCHES}
    for turn in range(num_turns + 1):
        names = list(WATCHES)
        shift = turn % len(names)
        for watch in names[shift:] + names[:shift]:  # none is always first
            seconds = _step_seconds(context, build, width, watch)
            if turn:  # the first turn warms torch up
                taken[watch].append(seconds)
    return taken


def _step_seconds(context: RankContext, build: Callable[[int], nn.Module], width: int, watch: str) -> float:
    """Build and train again, as a case does: streams belong to the watch under which they are created."""
    with WATCHES[watch](context):
        model = build(width)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        rows = torch.randn(16, width)
        steps = [_timed_step(model, optimizer, rows) for _ in range(1 + _TIMED_STEPS)]
    return median(steps[1:])  # the first builds buckets, streams and buffers


def _timed_step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> float:
    dist.barrier()  # so that a step does not include its peer's previous one
    started = time.perf_counter()
    model(rows).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - started
