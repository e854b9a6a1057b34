"""The caller's module is held against what an adapter shows, whole tensors and DTensors alike."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as Rows
from torch.distributed.tensor import distribute_tensor

from shardproof.engine.contract import PreparedModel, Shard, shard_of
from shardproof.harness.cases.training import AS_SHOWN
from shardproof.harness.torch_compat.process_groups import HashStore
from shardproof.harness.training.callers_module import Preparation


def _shown(model: nn.Module) -> dict[str, Shard]:
    return {name: shard_of(p) for name, p in model.named_parameters()}


def _move(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)


@pytest.fixture
def sharded() -> Iterator[nn.Module]:
    dist.init_process_group("fake", rank=0, world_size=2, store=HashStore())
    try:
        mesh, model = init_device_mesh("cpu", (2,)), nn.Linear(3, 4, bias=False)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Rows(0)]))
        yield model
    finally:
        dist.destroy_process_group()


def test_a_module_that_trains_holds_what_is_shown() -> None:
    model = nn.Linear(3, 4)
    preparation = Preparation(PreparedModel(model), model)
    _move(model)
    assert preparation.difference(_shown(model)) == f"{AS_SHOWN}, in 2 of 2 parameters"


def test_a_module_that_lags_is_named() -> None:
    model = nn.Linear(3, 4)
    preparation = Preparation(PreparedModel(model), model)
    _move(model)
    before = _shown(model)
    _move(model)
    assert preparation.difference(before).startswith("parameter 'weight' is ")


def test_shards_that_lag_are_named(sharded: nn.Module) -> None:
    preparation = Preparation(PreparedModel(sharded), sharded)
    _move(sharded)
    before = _shown(sharded)
    assert preparation.difference(before) == f"{AS_SHOWN}, in 1 of 1 parameters"
    _move(sharded)
    assert preparation.difference(before).startswith("parameter 'weight' is ")


def test_a_module_that_stays_as_it_was_built_proves_nothing() -> None:
    model, copy = nn.Linear(3, 4), nn.Linear(3, 4)
    preparation = Preparation(PreparedModel(model), model)
    assert preparation.difference(_shown(copy)) == f"{AS_SHOWN}, in 0 of 2 parameters"


def test_a_copy_that_trains_is_held_and_the_original_left_alone() -> None:
    model, copy = nn.Linear(3, 4), nn.Linear(3, 4)
    preparation = Preparation(PreparedModel(copy), model)
    _move(copy)
    assert preparation.difference(_shown(copy)) == f"{AS_SHOWN}, in 2 of 2 parameters"
    _move(model)
    assert preparation.difference(_shown(copy)).startswith("parameter 'weight' is ")


def test_a_unit_that_is_gathered_for_a_while_is_no_evidence(sharded: nn.Module) -> None:
    preparation = Preparation(PreparedModel(sharded), sharded)
    shown = _shown(sharded)
    sharded.weight = nn.Parameter(torch.zeros(4, 3))
    assert preparation.difference(shown) == f"{AS_SHOWN}, in 0 of 1 parameters"
