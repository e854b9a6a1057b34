"""join: ranks that run out of batches follow the others until all are done, or all of them stop."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from shardproof import SEVERAL
from shardproof.suites.data_parallel.bench import Bench, expects
from shardproof.suites.params import param, parametrize
from shardproof.suites.tower import LR, batch, copies, gradients, tower

pytestmark = pytest.mark.worlds(SEVERAL)

PARAMETERS = "parameters at the end"


def _num_batches(rank: int) -> int:
    """Return 2 for the first rank, 3 for the second, 4 for all others."""
    return 2 + min(rank, 2)


@parametrize(
    "divides_by_all, accumulates, compresses",
    param(True, False, False, id="by_all", kills=("SwapsTheDivisorsOfJoin", "EndsEachRankWithItsOwn")),
    param(
        False, False, False, id="by_those_left", kills=("SwapsTheDivisorsOfJoin", "EndsEachRankWithItsOwn")
    ),
    param(True, True, False, id="no_sync", kills="ReducesForThoseInNoSync"),
    param(True, False, True, id="hook", kills="JoinsWithoutItsHook"),
)
@expects(PARAMETERS)
def test_ranks_with_fewer_batches_follow(
    bench: Bench, divides_by_all: bool, accumulates: bool, compresses: bool
) -> None:
    root = bench.wrap(tower())
    if compresses:
        root.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(root.parameters(), lr=LR / 64)
    with root.join(divide_by_initial_world_size=divides_by_all):
        for step in range(_num_batches(bench.rank)):
            optimizer.zero_grad()
            for is_held in (True, False) if accumulates else (False,):
                with root.no_sync() if is_held else nullcontext():
                    loss = root(batch(bench.rank, step).to(bench.device)).sum()
                    (loss * 0.5 if accumulates else loss).backward()
            optimizer.step()
    alone = tower()
    for step in range(max(map(_num_batches, bench.ranks))):
        left = [rank for rank in bench.ranks if step < _num_batches(rank)]
        learnt = gradients(alone, left, [step])
        with torch.no_grad():
            for name, parameter in alone.named_parameters():
                parameter.sub_(learnt[name], alpha=LR / 64 / (bench.size if divides_by_all else len(left)))
    tolerance = torch.finfo(torch.float16).eps if compresses else 1e-5
    bench.near(
        PARAMETERS,
        copies(root.module.named_parameters()),
        copies(alone.named_parameters()),
        tolerance=tolerance,
    )


@pytest.mark.kills("NeverStopsEarly")
@expects("what every rank is told", "the step in which")
def test_all_ranks_stop_where_one_runs_out(bench: Bench) -> None:
    root, steps = bench.wrap(tower()), []

    def train() -> None:
        with root.join(throw_on_early_termination=True):
            for step in range(_num_batches(bench.rank)):
                root(batch(bench.rank, step).to(bench.device)).sum().backward()
                steps.append(step)

    bench.refuses("what every rank is told", train, RuntimeError, naming="exhausted")
    bench.same("the step in which", steps, [0, 1])
