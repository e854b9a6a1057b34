"""A sharded module is still the module: its class, names, parts, dtypes, methods; and how it comes to have values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from harness.tracing.ledger import Op, Phase
from harness.worlds.rank import RankContext
from tests.reference.front_doors import BY_NAME
from tests.reference.watching import (
    WIDTH,
    Chain,
    Unit,
    Watch,
    assert_gradients,
    both_doors,
    count,
    inputs_of,
    is_whole,
    plain_gradients,
    run,
    shard_chain,
)

SIZE = 2


def _classes(context: RankContext, door_name: str) -> list[str]:
    door = BY_NAME[door_name]
    sharded, replicated, plain = Unit(0), Unit(0), Unit(0)
    assert door.fully_shard(sharded) is sharded
    assert door.replicate(replicated) is replicated
    assert isinstance(sharded, Unit)
    assert isinstance(sharded, door.sharded_module)
    assert isinstance(replicated, door.sharded_module)
    assert not isinstance(plain, door.sharded_module)
    other = Unit(1)
    door.fully_shard(other)
    assert type(other) is type(sharded), "one class per class"
    return [type(sharded).__name__, type(replicated).__name__]


@both_doors
def test_the_class_says_what_it_was(door: str, tmp_path: Path) -> None:
    assert run(tmp_path, 1, _classes, door) == [["FSDPUnit", "ReplicateUnit"]]


def _containers(context: RankContext, door_name: str, apply_name: str) -> None:
    door = BY_NAME[door_name]
    apply = getattr(door, apply_name)
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


@both_doors
@pytest.mark.parametrize("apply", ["fully_shard", "replicate"])
def test_a_container_can_be_indexed_and_cut(door: str, apply: str, tmp_path: Path) -> None:
    run(tmp_path, SIZE, _containers, door, apply)


def _list_call(context: RankContext, door: str) -> list[dict[Op, int]]:
    watch = Watch(context)
    units = list(watch.chain.units)
    returned = BY_NAME[door].fully_shard(units[1:], reshard_after_forward=True)
    assert returned is not None
    assert all(a is b for a, b in zip(returned, units[1:], strict=True))
    BY_NAME[door].fully_shard(watch.chain, reshard_after_forward=True)
    watch.chain.units[1].unshard()  # type: ignore[operator]  # of the sharded class
    assert is_whole(units[1]), "one group: gathered together"
    assert is_whole(units[2])
    watch.chain.units[2].reshard()  # type: ignore[operator]
    assert not is_whole(units[1])
    watch.mark = lambda kind, index: None  # type: ignore[method-assign]  # unit 0 has no marks of its own
    watch.train()
    assert_gradients(watch.chain, plain_gradients(SIZE))
    entries = [e for e in watch.seen().entries if e.phase is not Phase.PREPARE]
    return [count(entries, phase) for phase in (Phase.FORWARD, Phase.BACKWARD)]


@both_doors
def test_a_list_is_one_group(door: str, tmp_path: Path) -> None:
    # The root owns unit 0 and its own vector.
    expected = [{Op.ALL_GATHER: 2}, {Op.ALL_GATHER: 2, Op.REDUCE_SCATTER: 2}]
    assert run(tmp_path, SIZE, _list_call, door) == [expected] * SIZE


class Shared(nn.Module):
    """Uses one layer twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = self.first
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run the shared layer twice."""
        result: torch.Tensor = self.last(self.second(self.first(inputs).relu()))
        return result


def _share(context: RankContext, door: str, apart: bool) -> dict[Op, int]:
    torch.manual_seed(1)
    model, plain = Shared(), Shared()
    plain.load_state_dict(model.state_dict())
    if apart:
        BY_NAME[door].fully_shard(model.first, reshard_after_forward=True)
    BY_NAME[door].fully_shard(model, reshard_after_forward=True)
    assert model.first is model.second
    for step in range(2):
        model.zero_grad()
        with context.recorder.during(Phase.STEP, step=step):
            model(inputs_of(context.rank)).sum().backward()
    for rank in range(SIZE):
        (plain(inputs_of(rank)).sum() / SIZE).backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert_gradients(model, expected)
    assert not is_whole(model.first)
    return count(e for e in context.recorder.ledger() if e.step == 1 and e.op is Op.REDUCE_SCATTER)


@both_doors
def test_a_layer_used_twice_is_reduced_once(door: str, tmp_path: Path) -> None:
    assert run(tmp_path / "apart", SIZE, _share, door, True) == [{Op.REDUCE_SCATTER: 2}] * SIZE
    assert run(tmp_path / "whole", SIZE, _share, door, False) == [{Op.REDUCE_SCATTER: 1}] * SIZE


def _ignore(context: RankContext, door: str) -> None:
    chain = Chain()
    unit = chain.units[1]
    assert isinstance(unit, Unit)
    ignored = unit.extra
    for module in (*chain.units, chain):
        BY_NAME[door].fully_shard(module, ignored_params={ignored})
    assert unit.extra is ignored
    assert not isinstance(unit.extra, DTensor)
    assert isinstance(unit.weight, DTensor)
    chain(inputs_of(context.rank)).sum().backward()
    assert unit.extra is ignored
    assert ignored.grad is not None
    mine = Chain()
    mine(inputs_of(context.rank)).sum().backward()
    own = mine.units[1]
    assert isinstance(own, Unit)
    assert own.extra.grad is not None
    torch.testing.assert_close(ignored.grad, own.extra.grad, msg="not reduced: this rank's own gradient")
    expected = plain_gradients(SIZE)
    expected["units.1.extra"] = own.extra.grad
    assert_gradients(chain, expected)


@both_doors
def test_ignored_parameters_stay_whole_and_unreduced(door: str, tmp_path: Path) -> None:
    run(tmp_path, SIZE, _ignore, door)


def _materialize(context: RankContext, door: str) -> None:
    with torch.device("meta"):
        chain = Chain()
    model = shard_chain(BY_NAME[door], chain)
    assert {param.device.type for param in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, param in model.named_parameters():
            value = torch.eye(WIDTH) / 2 if name.endswith("weight") else torch.ones(param.shape)
            full = torch.distributed.tensor.distribute_tensor(value, param.device_mesh, param.placements)
            param.copy_(full)
    for _ in range(2):
        model.zero_grad()
        model(inputs_of(context.rank)).sum().backward()
        assert_gradients(model, plain_gradients(context.size))


@both_doors
def test_a_model_may_get_its_values_after_sharding(door: str, tmp_path: Path) -> None:
    run(tmp_path, 3, _materialize, door)


def _cast(context: RankContext, door: str, when: str) -> None:
    watch = Watch(context)
    model = shard_chain(BY_NAME[door], watch.chain, reshard_after_forward=False)
    if when == "whole":
        for module in (model, *watch.chain.units):
            module.unshard()
    assert model.to(torch.float64) is model
    assert not watch.whole()
    for step in range(2):
        model.zero_grad()
        inputs = inputs_of(context.rank, dtype=torch.float64)
        watch.backward(watch.forward(inputs, step=step), step=step)
        for param in model.parameters():
            assert isinstance(param.grad, DTensor)
            told = {param.dtype, param.to_local().dtype, param.grad.dtype, param.grad.to_local().dtype}
            assert told == {torch.float64}
    assert_gradients(model, {name: g.double() for name, g in plain_gradients(context.size).items()})


@both_doors
def test_a_model_may_be_cast_after_sharding(door: str, tmp_path: Path) -> None:
    run(tmp_path, 3, _cast, door, "sharded")


def test_a_model_may_be_cast_after_it_was_gathered(tmp_path: Path) -> None:
    # torch 2.13 keeps the gathered buffers in the old dtype: "Expected out tensor to have dtype double, but got float".
    run(tmp_path, 3, _cast, "reference", "whole")


def _columns(context: RankContext, door: str) -> None:
    watch = Watch(context)

    def largest(param: nn.Parameter) -> Shard:
        return Shard(param.ndim - 1)

    told: list[bool] = []
    unit = watch.chain.units[0]
    unit.register_forward_pre_hook(lambda *_: told.extend(p.is_contiguous() for p in unit.parameters()))
    model = shard_chain(BY_NAME[door], watch.chain, shard_placement_fn=largest)
    unit.register_forward_pre_hook(lambda *_: told.extend(p.is_contiguous() for p in unit.parameters()))
    watch.train()
    assert told
    assert all(told)
    assert model.units[0].weight.placements == (Shard(1),)
    for param in model.parameters():
        assert isinstance(param.grad, DTensor)
        tensors = (param, param.to_local(), param.grad, param.grad.to_local())
        assert all(tensor.is_contiguous() for tensor in tensors)
    assert_gradients(model, plain_gradients(context.size))


@both_doors
def test_columns_are_contiguous_everywhere(door: str, tmp_path: Path) -> None:
    run(tmp_path, 4, _columns, door)


class Encoder(nn.Module):
    """Computes in another method than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def encode(self, inputs: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """Use the weight directly."""
        return inputs @ self.layer.weight * scale

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Not used."""
        raise NotImplementedError


class Caller(nn.Module):
    """Calls the other method."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Encode and scale."""
        return self.encoder.encode(inputs, scale=2.0) * self.gain


def _register(context: RankContext, door_name: str) -> list[dict[Op, int]]:
    door, model = BY_NAME[door_name], Caller()
    with torch.no_grad():
        model.encoder.layer.weight.copy_(torch.eye(WIDTH))
    door.register_forward_method(model, "no such method of a plain module")  # a no-op
    door.fully_shard(model.encoder, reshard_after_forward=True)
    door.fully_shard(model)
    door.register_forward_method(model.encoder, "encode")
    with context.recorder.during(Phase.FORWARD, step=0):
        output = model(inputs_of(context.rank))
    assert torch.equal(output, 2 * inputs_of(context.rank))
    assert not is_whole(model.encoder.layer)
    with context.recorder.during(Phase.BACKWARD, step=0):
        output.sum().backward()
    plain = Caller()
    with torch.no_grad():
        plain.encoder.layer.weight.copy_(torch.eye(WIDTH))
    for rank in range(SIZE):
        (plain(inputs_of(rank)).sum() / SIZE).backward()
    assert_gradients(model, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None})
    return [count(context.recorder.ledger(), phase) for phase in (Phase.FORWARD, Phase.BACKWARD)]


@both_doors
def test_a_registered_method_gathers_and_frees(door: str, tmp_path: Path) -> None:
    expected = [{Op.ALL_GATHER: 2}, {Op.ALL_GATHER: 1, Op.REDUCE_SCATTER: 2}]
    assert run(tmp_path, SIZE, _register, door) == [expected] * SIZE


def _share_streams(context: RankContext, door_name: str) -> None:
    door = BY_NAME[door_name]
    door.share_comm_ctx([])
    stages: list[Any] = [door.fully_shard(Chain()) for _ in range(3)]
    door.share_comm_ctx(stages)
    for _ in range(2):
        hidden = inputs_of(context.rank)
        for stage in stages:
            stage.zero_grad()
            hidden = stage(hidden)
        hidden.sum().backward()
    plain = nn.Sequential(*(Chain() for _ in range(3)))
    for rank in range(SIZE):
        (plain(inputs_of(rank)).sum() / SIZE).backward()
    for i, stage in enumerate(stages):
        expected = {name: p.grad for name, p in plain[i].named_parameters() if p.grad is not None}
        assert_gradients(stage, expected)
        assert not is_whole(stage)


@both_doors
def test_roots_may_share_streams(door: str, tmp_path: Path) -> None:
    run(tmp_path, SIZE, _share_streams, door)


def _one_by_one(context: RankContext, door: str) -> None:
    """Make, shard and forget layers: a new parameter at an old address is no duplicate (T29)."""
    model = nn.Sequential()
    for _ in range(8):
        layer = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16, bias=False))
        BY_NAME[door].fully_shard(layer)
        model.append(layer)
    BY_NAME[door].fully_shard(model)
    model(torch.ones(2, 4, 16)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@both_doors
def test_layers_made_one_by_one_are_no_duplicates(door: str, tmp_path: Path) -> None:
    run(tmp_path, SIZE, _one_by_one, door)
