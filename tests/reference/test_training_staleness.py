"""Whole parameters that outlive an optimizer step: the next forward must see what the step wrote."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.worlds.launch import launch
from harness.worlds.outcome import Returned
from harness.worlds.rank import RankContext
from harness.worlds.spec import WorldKind, WorldSpec
from tests.reference.front_doors import BY_NAME, REFERENCE, TORCH

RANKS = 2


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(2)))


def _evaluate_between_backward_and_step(context: RankContext, door: str, keeps: bool) -> float:
    """Give the largest error of an output after a step that an evaluation, or a kept gather, came before."""
    plain = _model()
    model = copy.deepcopy(plain)
    for module in (model[0], model):  # type: ignore[index]  # a Sequential
        BY_NAME[door].fully_shard(module)
    if keeps:
        model.set_reshard_after_backward(False)  # type: ignore[operator]  # gained by sharding
    inputs = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
    for trained in (model, plain):
        optimizer = torch.optim.SGD(trained.parameters(), lr=1.0)
        trained(inputs).square().mean().backward()
        with torch.no_grad():
            trained(inputs)
        optimizer.step()
    with torch.no_grad():
        error: torch.Tensor = (model(inputs) - plain(inputs)).abs().max()
    return error.item()


def _errors(door: str, keeps: bool, folder: Path) -> list[float]:
    spec = WorldSpec(kind=WorldKind.THREADS, size=RANKS, deadline_s=30)
    result = launch(spec, _evaluate_between_backward_and_step, door, keeps, folder=folder)
    assert all(isinstance(o, Returned) for o in result.outcomes), result.outcomes
    return [o.value for o in result.outcomes if isinstance(o, Returned)]


@pytest.mark.parametrize("keeps", [False, True], ids=["freed after backward", "kept after backward"])
def test_a_forward_sees_what_the_step_wrote(keeps: bool, tmp_path: Path) -> None:
    assert _errors(REFERENCE.name, keeps, tmp_path) == pytest.approx([0.0] * RANKS, abs=1e-12)


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="measured with torch 2.13; look again")
@pytest.mark.parametrize("keeps", [False, True], ids=["freed after backward", "kept after backward"])
def test_torch_computes_with_what_it_gathered_before_the_step(keeps: bool, tmp_path: Path) -> None:
    # The root keeps whole parameters after forward, and an evaluation has no backward that would free them.
    assert min(_errors(TORCH.name, keeps, tmp_path)) > 0.01
