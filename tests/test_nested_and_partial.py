"""What the reference engine once got wrong: nested prefetches, sums of microbatches, a policy changed on the way."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch
from torch.distributed.tensor import DTensor

from shardproof.engine.reference import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ModuleWrapPolicy,
    fully_shard,
)
from shardproof.harness.tracing.ledger import Op, Phase
from shardproof.harness.worlds.launch import launch
from shardproof.harness.worlds.outcome import Returned
from shardproof.harness.worlds.rank import RankContext
from shardproof.harness.worlds.spec import WorldKind, WorldSpec

WIDTH = 8


class Inner(nn.Linear):
    """A unit inside a unit, told apart from others by its number of parameters."""

    def __init__(self, index: int) -> None:
        super().__init__(WIDTH, WIDTH)
        self.mark = nn.Parameter(torch.ones(100 * (index + 1)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * self.mark.mean()


class Outer(nn.Module):
    """A unit with parameters of its own around two units."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.first, self.second = Inner(3 * index), Inner(3 * index + 1)
        self.mark = nn.Parameter(torch.ones(100 * (3 * index + 3)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        second: torch.Tensor = self.second(self.first(inputs))
        return second * self.mark.mean()


def _run(folder: Path, size: int, body: Any, *args: Any) -> list[Any]:
    result = launch(WorldSpec(kind=WorldKind.THREADS, size=size), body, *args, folder=folder)
    values = []
    for outcome in result.outcomes:
        assert isinstance(outcome, Returned), outcome
        values.append(outcome.value)
    return values


def _gathers_of_a_backward(context: RankContext, prefetch: str) -> list[int]:
    """Return how often each unit was gathered in a backward; a unit is known by its size."""
    model = FullyShardedDataParallel(
        nn.Sequential(Outer(0), Outer(1)),
        auto_wrap_policy=ModuleWrapPolicy({Outer, Inner}),
        backward_prefetch=BackwardPrefetch[prefetch],
    )
    loss = model(torch.ones(2, WIDTH)).sum()
    before = len(context.recorder.ledger())
    with context.recorder.during(Phase.BACKWARD, step=0, microbatch=0):
        loss.backward()
    entries = context.recorder.ledger()[before:]
    return sorted(Counter(e.num_bytes for e in entries if e.op is Op.ALL_GATHER).values())


@pytest.mark.parametrize("prefetch", ["BACKWARD_PRE", "BACKWARD_POST"])
def test_a_backward_gathers_each_of_nested_units_once(prefetch: str, tmp_path: Path) -> None:
    assert _run(tmp_path, 2, _gathers_of_a_backward, prefetch) == [[1] * 6] * 2


class Scaled(nn.Module):
    """Has a gradient that is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, factor: float) -> torch.Tensor:
        return (self.weight * factor).sum()


def _gradient_of_microbatches(context: RankContext, reduce_dtype: str) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    precision = MixedPrecisionPolicy(reduce_dtype=getattr(torch, reduce_dtype))
    model: Any = fully_shard(Scaled(), mesh=mesh, mp_policy=precision)
    factors = (256.0, *[1.0] * 8)
    for index, factor in enumerate(factors):
        model.set_requires_all_reduce(index == len(factors) - 1)
        model(factor).backward()
    gradient = model.weight.grad
    assert isinstance(gradient, DTensor)
    return gradient.to_local().tolist()


@pytest.mark.parametrize("reduce_dtype", ["bfloat16", "float32"])
def test_small_microbatches_count_beside_a_large_one_where_the_all_reduce_waits(
    reduce_dtype: str, tmp_path: Path
) -> None:
    # bfloat16 has no number between 256 and 258: summed in it, microbatches of 1 would be lost one by one.
    assert _run(tmp_path, 4, _gradient_of_microbatches, reduce_dtype) == [[264.0] * (WIDTH // 2)] * 4


def _gradient_after_a_change_of_policy(context: RankContext) -> list[float]:
    unit: Any = fully_shard(nn.Linear(WIDTH, WIDTH, bias=False), reshard_after_forward=2)
    nn.init.ones_(unit.weight)
    model: Any = fully_shard(nn.Sequential(unit, nn.Linear(WIDTH, 1)))
    inputs = torch.ones(1, WIDTH, requires_grad=True)
    loss = model(inputs).sum()
    unit.set_reshard_after_forward(True)
    loss.backward()
    assert inputs.grad is not None
    expected = WIDTH * [model[1].weight.full_tensor().sum().item()]
    torch.testing.assert_close(inputs.grad, torch.tensor([expected]))
    gradient: list[float] = inputs.grad.tolist()
    return gradient


def test_the_policy_may_change_between_forward_and_backward(tmp_path: Path) -> None:
    first, *rest = _run(tmp_path, 4, _gradient_after_a_change_of_policy)
    assert all(other == first for other in rest)
