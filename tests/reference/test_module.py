"""A sharded module is still the module: its class, parts, parameters and dtypes; and how it comes to have values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from shardproof.harness.worlds.rank import RankContext
from tests.reference.front_doors import BY_NAME, each_door
from tests.reference.models import (
    WIDTH,
    Chain,
    Unit,
    apply_to,
    assert_gradients,
    chain_gradients,
    hybrid_mesh,
    inputs_of,
    mean_gradients,
    whole_units,
)
from tests.reference.ranks import Ranks

SIZE = 2
each_call = pytest.mark.parametrize("call", ["fully_shard", "replicate"])


def _classes(context: RankContext, door_name: str) -> list[str]:
    door = BY_NAME[door_name]
    sharded, replicated, other, plain = (Unit(index) for index in range(4))
    assert door.fully_shard(sharded) is sharded
    assert door.replicate(replicated) is replicated
    assert isinstance(sharded, Unit)
    assert isinstance(sharded, door.sharded_module)
    assert isinstance(replicated, door.sharded_module)
    assert not isinstance(plain, door.sharded_module)
    assert type(door.fully_shard(other)) is type(sharded), "one class per class"
    return [type(sharded).__name__, type(replicated).__name__]


@each_door
def test_the_class_is_named_after_what_it_was(door: str, ranks: Ranks) -> None:
    assert ranks.run(1, _classes, door) == [["FSDPUnit", "ReplicateUnit"]]


def _containers(context: RankContext, door_name: str, call: str) -> None:
    door = BY_NAME[door_name]
    apply = getattr(door, call)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    for layer in (layers[0], layers[1]):
        apply(layer)
    model: Any = apply(layers)
    half = model[:2]
    assert type(half) is nn.Sequential, "a slice is a container of the original class"
    assert [half[i] is model[i] for i in range(2)] == [True, True]
    assert isinstance(model[0], door.sharded_module)
    assert not isinstance(model[3], door.sharded_module)
    assert len(model) == 4
    model(torch.ones(1, WIDTH)).sum().backward()


@each_door
@each_call
def test_a_container_can_be_indexed_and_cut(call: str, door: str, ranks: Ranks) -> None:
    ranks.run(SIZE, _containers, door, call)


# --- parameters ---------------------------------------------------------------------------------------------------


def _placements(context: RankContext, door_name: str) -> list[set[tuple[Placement, ...]]]:
    door = BY_NAME[door_name]
    shard, replicate = door.fully_shard, door.replicate
    models = [
        apply_to(Chain(), shard),
        apply_to(Chain(), shard, mesh=hybrid_mesh(2, 2)),
        apply_to(Chain(), shard, mesh=hybrid_mesh(4, 1)),
        apply_to(Chain(), replicate),
    ]
    for model in models:
        for mine, plain in zip(model.parameters(), Chain().parameters(), strict=True):
            assert mine.shape == plain.shape
            assert mine.requires_grad
            assert mine.to_local().is_contiguous()
    own = init_device_mesh("cpu", (4,))  # a caller's mesh of all ranks, which tensors of both can share
    assert all(p.device_mesh == own for p in models[0].parameters())
    return [{p.placements for p in model.parameters()} for model in models]


@each_door
def test_shards_say_where_they_are(door: str, ranks: Ranks) -> None:
    hybrid = {(Replicate(), Shard(0))}
    assert ranks.run(4, _placements, door) == [[{(Shard(0),)}, hybrid, hybrid, {(Replicate(),)}]] * 4


def _columns(context: RankContext, door: str) -> None:
    chain, seen = Chain(), list[bool]()
    unit = chain.units[0]
    model = apply_to(chain, BY_NAME[door].fully_shard, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    unit.register_forward_pre_hook(lambda *_: seen.extend(p.is_contiguous() for p in unit.parameters()))
    model(inputs_of(context.rank)).sum().backward()
    assert seen == [True, True]
    assert model.units[0].weight.placements == (Shard(1),)
    for param in model.parameters():
        tensors = (param, param.to_local(), param.grad, param.grad.to_local())
        assert all(tensor.is_contiguous() for tensor in tensors)
    assert_gradients(model, chain_gradients(context.size))


@each_door
def test_columns_are_contiguous_everywhere(door: str, ranks: Ranks) -> None:
    """Upstream row T25."""
    ranks.run(4, _columns, door)


def _identities(context: RankContext, door: str) -> None:
    model = apply_to(Chain(), BY_NAME[door].fully_shard)
    before = list(model.parameters())
    for _ in range(2):
        model(inputs_of(context.rank)).sum().backward()
        assert all(x is y for x, y in zip(before, model.parameters(), strict=True))


@each_door
def test_parameters_keep_their_identity(door: str, ranks: Ranks) -> None:
    """Else an optimizer made before the step would hold others (BUGS C6-03)."""
    ranks.run(SIZE, _identities, door)


def _ignore(context: RankContext, door: str) -> None:
    chain = Chain()
    ignored = chain.get_parameter("units.1.extra")
    model = apply_to(chain, BY_NAME[door].fully_shard, ignored_params={ignored})
    model(inputs_of(context.rank)).sum().backward()
    assert chain.get_parameter("units.1.extra") is ignored
    own = mean_gradients(Chain(), [context.rank])
    # Not reduced: this rank's own gradient.
    name = "units.1.extra"
    assert_gradients(model, {**chain_gradients(SIZE), name: own[name]})


@each_door
def test_ignored_parameters_stay_whole_and_unreduced(door: str, ranks: Ranks) -> None:
    ranks.run(SIZE, _ignore, door)


# --- values -------------------------------------------------------------------------------------------------------


def _fill(context: RankContext, door: str) -> None:
    with torch.device("meta"):
        chain = Chain()
    model = apply_to(chain, BY_NAME[door].fully_shard)
    assert {param.device.type for param in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    with torch.no_grad():
        for mine, plain in zip(model.parameters(), Chain().parameters(), strict=True):
            mine.copy_(distribute_tensor(plain.detach(), mine.device_mesh, mine.placements))
    for _ in range(2):
        model.zero_grad()
        model(inputs_of(context.rank)).sum().backward()
        assert_gradients(model, chain_gradients(context.size))


@each_door
def test_a_model_may_get_its_values_after_sharding(door: str, ranks: Ranks) -> None:
    ranks.run(3, _fill, door)


def _cast(context: RankContext, door: str, unshards: bool) -> None:
    chain = Chain()
    model = apply_to(chain, BY_NAME[door].fully_shard, reshard_after_forward=False)
    if unshards:
        for module in (model, *model.units):
            module.unshard()
    assert model.to(torch.float64) is model
    assert whole_units(chain) == set()
    model(inputs_of(context.rank, torch.float64)).sum().backward()
    for param in model.parameters():
        told = {param.dtype, param.to_local().dtype, param.grad.dtype, param.grad.to_local().dtype}
        assert told == {torch.float64}
        assert param._spec.tensor_meta.dtype == torch.float64
    assert_gradients(model, chain_gradients(context.size, dtype=torch.float64))


@each_door
def test_a_model_may_be_cast_after_sharding(door: str, ranks: Ranks) -> None:
    """Upstream rows T06, R04."""
    ranks.run(3, _cast, door, False)


def test_a_model_may_be_cast_after_it_was_gathered(ranks: Ranks) -> None:
    # torch 2.13 keeps the gathered buffers in the old dtype: "Expected out tensor to have dtype double, but got float".
    ranks.run(3, _cast, "reference", True)


def _share(context: RankContext, door: str, is_apart: bool) -> None:
    layer, plain_layer = Unit(0), Unit(0)
    model, plain = nn.Sequential(layer, nn.Tanh(), layer), nn.Sequential(plain_layer, nn.Tanh(), plain_layer)
    if is_apart:
        BY_NAME[door].fully_shard(layer)
    BY_NAME[door].fully_shard(model)
    for _ in range(2):
        model.zero_grad()
        model(inputs_of(context.rank)).sum().backward()
    assert model[0] is model[2]
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert_gradients(model, mean_gradients(plain, range(SIZE)))


@each_door
@pytest.mark.parametrize("is_apart", [True, False], ids=["a unit", "in the root"])
def test_a_layer_of_two_names_is_one(is_apart: bool, door: str, ranks: Ranks) -> None:
    ranks.run(SIZE, _share, door, is_apart)
