"""Parameters of complex numbers step as on one process, however their rows are cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from engine.reference import fully_shard
from harness.worlds.launch import launch
from harness.worlds.outcome import Returned
from harness.worlds.rank import RankContext
from harness.worlds.spec import WorldKind, WorldSpec

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}


class Turned(nn.Module):
    """Multiplies by a complex parameter."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.turns = nn.Parameter(torch.randn(shape, dtype=torch.complex64, generator=generator))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows * self.turns).flatten(1).sum(-1)


def _steps(
    context: RankContext, shape: tuple[int, ...], optimizer: str, foreach: bool
) -> tuple[float, float]:
    """Give how far the parameter is from a plain model's after three steps, and how far it moved."""
    plain = Turned(*shape)
    sharded = copy.deepcopy(plain)
    fully_shard(sharded)
    before = plain.turns.detach().clone()
    generator = torch.Generator().manual_seed(1)
    both = [
        (model, OPTIMIZERS[optimizer](model.parameters(), lr=0.1, foreach=foreach))
        for model in (plain, sharded)
    ]
    for _ in range(3):
        rows = torch.randn(4, *shape, dtype=torch.complex64, generator=generator)
        for model, stepping in both:
            model(rows).abs().square().mean().backward()
            stepping.step()
            stepping.zero_grad()
    turns = sharded.turns
    assert isinstance(turns, DTensor)
    error = (turns.full_tensor() - plain.turns).abs().max().item()
    return error, (plain.turns - before).abs().max().item()


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("shape", [(6,), (5,), (5, 2)], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("foreach", [False, True])
def test_steps_as_on_one_process(
    optimizer: str, shape: tuple[int, ...], size: int, foreach: bool, tmp_path: Path
) -> None:
    spec = WorldSpec(kind=WorldKind.THREADS, size=size)
    result = launch(spec, _steps, shape, optimizer, foreach, folder=tmp_path)
    for outcome in result.outcomes:
        assert isinstance(outcome, Returned), outcome
        error, moved = outcome.value
        assert error < 1e-5
        assert moved > 0.01
