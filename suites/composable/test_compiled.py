"""Compiled models train like eager ones: hooks of the engine stay outside of the compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardproof import APART, FOURS
from shardproof.fixtures.problems import TRANSFORMER
from shardproof.suites.composable.bench import STEP, Bench, cut, expects, layers, steps_on_shared_rows
from shardproof.suites.composable.bench import whole_gradients
from shardproof.suites.params import parametrize
from shardproof.suites.tower import Tower, fill, shown_gradients, tower

pytestmark = pytest.mark.worlds(APART)

GRADIENTS = "gradients"


class _Nested(nn.Module):
    """A tower that runs twice, checkpointed, around a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.frozen = Tower(), nn.Linear(1, 3)
        fill(self)
        self.frozen.requires_grad_(False)

    def forward(self, rows: Any) -> Any:
        """Run the tower, and again on the frozen layer's output."""
        rows = self.frozen(checkpoint(self.tower, rows, use_reentrant=False))
        return self.tower(rows) / 64


@pytest.mark.kills("SumsWhatACallerPrepares")
@parametrize("unit", "", "middle", ids=["root", "unit"])
@parametrize("api", "fully_shard", "replicate")
@expects(STEP)
def test_one_group_trains_as_it_does_uncompiled(bench: Bench, api: str, unit: str) -> None:
    model = tower()
    for name in dict.fromkeys((unit, "")):
        getattr(bench.api, api)(model.get_submodule(name), mesh=bench.mesh())
    model.get_submodule(unit).compile(backend="aot_eager")
    bench.steps(model)


@pytest.mark.worlds(FOURS)
@pytest.mark.kills("SumsWhatACallerPrepares", world="processes:4")
@parametrize("api", "fully_shard", "replicate")
@expects(STEP)
def test_tensors_that_are_cut_train_as_they_do_uncompiled(bench: Bench, api: str) -> None:
    model, mesh = cut(bench)
    getattr(bench.api, api)(model, mesh=mesh["data"]).compile(backend="aot_eager")
    steps_on_shared_rows(bench, model, layers(), 2)


@pytest.mark.kills("SumsWhatACallerPrepares")
@expects(GRADIENTS)
def test_a_transformer_trains_as_it_does_uncompiled(bench: Bench) -> None:
    model, alone = TRANSFORMER.build(), TRANSFORMER.build()
    for decoder in (model, alone):
        decoder.get_submodule("blocks.0.up").requires_grad_(False)
    bench.shard(model, units=TRANSFORMER.units).compile(backend="aot_eager")
    for trained, ranks in ((model, [bench.rank]), (alone, bench.ranks)):
        for rank in ranks:
            tokens = (torch.arange(10).view(2, 5) * (rank + 3)) % 7
            (trained(tokens).logsumexp(-1).sum() / len(ranks)).backward()
    bench.near(GRADIENTS, whole_gradients(model), shown_gradients(alone), tolerance=1e-4)


@pytest.mark.kills("SumsWhatACallerPrepares")
@expects(STEP)
def test_nested_units_that_run_twice_train_as_they_do_uncompiled(bench: Bench) -> None:
    model = bench.shard(_Nested(), units=("tower", "tower.middle"))
    model.compile(backend="aot_eager")
    bench.steps(model, alone=_Nested())
