"""Gathering and freeing by hand, and what is registered before, between and after: shards, or plain tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from harness.tracing.ledger import Op, Phase
from harness.worlds.rank import RankContext
from tests.reference.front_doors import BY_NAME
from tests.reference.watching import (
    ROOT,
    WIDTH,
    Chain,
    Watch,
    assert_gradients,
    both_doors,
    count,
    doors_with,
    hybrid_mesh,
    is_whole,
    plain_gradients,
    replicate_chain,
    run,
    shard_chain,
)

SIZE = 4
ALL = {ROOT, 0, 1, 2}


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in _named(model)}


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def _assert_original(model: nn.Module) -> None:
    expected = dict(Chain().named_parameters())
    actual = _values(model)
    assert list(actual) == list(expected), "names and their order"
    for name, value in actual.items():
        assert value.is_contiguous(), name
        assert torch.equal(value, expected[name]), name


def _register(context: RankContext, door: str, reshard: bool | int | None) -> list[frozenset[int]]:
    watch = Watch(context)
    model = shard_chain(BY_NAME[door], watch.chain, reshard_after_forward=reshard)
    told = [watch.whole()]
    _assert_original(model)
    output = watch.forward()
    told.append(watch.whole())
    _assert_original(model)
    watch.backward(output)
    told.append(watch.whole())
    _assert_original(model)
    with torch.no_grad():
        watch.forward()
    told.append(watch.whole())
    for module in (model, *watch.chain.units):
        module.reshard()
    told.append(watch.whole())
    _assert_original(model)
    return told


@both_doors
@pytest.mark.parametrize(
    ("reshard", "kept"), [(True, set()), (2, set()), (None, {ROOT}), (False, ALL)], ids=str
)
def test_what_is_registered_when(
    door: str, reshard: bool | int | None, kept: set[int], tmp_path: Path
) -> None:
    # Before; after forward; after backward; after a forward without gradients; after reshard by hand.
    expected = [set(), kept, set(), kept, set()]
    for told in run(tmp_path, SIZE, _register, door, reshard):
        assert told == expected


def _register_replicas(context: RankContext, door: str) -> list[frozenset[int]]:
    watch = Watch(context)
    model = replicate_chain(BY_NAME[door], watch.chain)
    told = [watch.whole()]
    assert all(_is_replicated(param) for param in model.parameters())
    output = watch.forward()
    told.append(watch.whole())
    watch.backward(output)
    told.append(watch.whole())
    watch.forward()
    for module in (model, *watch.chain.units):
        module.reshard()
    told.append(watch.whole())
    _assert_original(model)
    return told


def _is_replicated(param: nn.Parameter) -> bool:
    return isinstance(param, DTensor) and param.placements == (Replicate(),)


@both_doors
def test_what_replicas_register_when(door: str, tmp_path: Path) -> None:
    for told in run(tmp_path, SIZE, _register_replicas, door):
        assert told == [set(), ALL, set(), set()]


def _placements(context: RankContext, door: str) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name, mesh in {"flat": None, "hybrid": hybrid_mesh(2, 2), "one shard": hybrid_mesh(4, 1)}.items():
        model = shard_chain(BY_NAME[door], Chain(), mesh=mesh)
        told[name] = {(p.placements, p.device_mesh.ndim) for p in model.parameters()}
        assert all(p.to_local().is_contiguous() and p.requires_grad for p in model.parameters())
        assert all(p.shape == q.shape for p, q in zip(model.parameters(), Chain().parameters(), strict=True))
    return told


@both_doors
def test_shards_say_where_they_are(door: str, tmp_path: Path) -> None:
    hybrid = {((Replicate(), Shard(0)), 2)}
    expected = {"flat": {((Shard(0),), 1)}, "hybrid": hybrid, "one shard": hybrid}
    assert run(tmp_path, SIZE, _placements, door) == [expected] * SIZE


def _unshard(context: RankContext, door_name: str, is_async: bool) -> dict[Op, int]:
    door, watch = BY_NAME[door_name], Watch(context)
    model = shard_chain(door, watch.chain)
    unit: Any = watch.chain.units[1]
    with context.recorder.during(Phase.FORWARD, step=7):
        handle = unit.unshard(async_op=is_async)  # before any forward
        if is_async:
            assert isinstance(handle, door.unshard_handle)
            assert not is_whole(unit), "nothing is registered before the wait"
            handle.wait()
            handle.wait()  # a second wait is a no-op
        else:
            assert handle is None
        assert watch.whole() == {1}, "only this module"
        assert type(unit.weight) is nn.Parameter
        unit.unshard()  # already there
    _assert_original(model)
    unit.reshard()
    unit.reshard()
    assert not watch.whole()
    _assert_original(model)
    watch.train()
    assert_gradients(watch.chain, plain_gradients(SIZE))
    return count(e for e in watch.seen().entries if e.step == 7)


@both_doors
@pytest.mark.parametrize("is_async", [False, True])
def test_unshard_gathers_one_module_once_even_before_lazy_init(
    door: str, is_async: bool, tmp_path: Path
) -> None:
    assert run(tmp_path, SIZE, _unshard, door, is_async) == [{Op.ALL_GATHER: 1}] * SIZE


def _unshard_ahead(context: RankContext, door: str, waits: bool) -> list[dict[Op, int]]:
    watch = Watch(context)
    model = shard_chain(BY_NAME[door], watch.chain)
    for step in range(2):
        model.zero_grad()
        handles = []
        with context.recorder.during(Phase.PREPARE, step=step):
            handles = [module.unshard(async_op=True) for module in (model, *watch.chain.units)]
        if waits:
            for handle in handles:
                handle.wait()
        watch.train(step=step)
        del handles
    assert_gradients(watch.chain, plain_gradients(SIZE))
    seen = watch.seen()
    assert not seen.left_whole
    return [
        count((e for e in seen.entries if e.step == 1), phase)
        for phase in (Phase.PREPARE, Phase.FORWARD, Phase.BACKWARD)
    ]


@both_doors
@pytest.mark.parametrize("waits", [True, False])
def test_forward_uses_what_was_gathered_ahead(door: str, waits: bool, tmp_path: Path) -> None:
    expected = [{Op.ALL_GATHER: 4}, {}, {Op.ALL_GATHER: 3, Op.REDUCE_SCATTER: 4}]
    assert run(tmp_path, SIZE, _unshard_ahead, door, waits) == [expected] * SIZE


class Parent(nn.Module):
    """Owns no parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Ask the child."""
        result: torch.Tensor = self.child(inputs)
        return result


def _unshard_nothing(context: RankContext, door_name: str) -> None:
    door, model = BY_NAME[door_name], Parent()
    door.fully_shard(model.child)
    root: Any = door.fully_shard(model)
    handle = root.unshard(async_op=True)
    assert isinstance(handle, door.unshard_handle)
    handle.wait()
    assert root.unshard() is None
    root.reshard()
    assert not is_whole(model.child)
    model(torch.ones(1, WIDTH)).sum().backward()


@both_doors
def test_unshard_of_a_module_without_parameters(door: str, tmp_path: Path) -> None:
    run(tmp_path, 2, _unshard_nothing, door)


def _unshard_in_low_precision(context: RankContext, door_name: str) -> tuple[list[str], list[str]]:
    door, watch = BY_NAME[door_name], Watch(context)
    policy = door.mixed_precision(param_dtype=torch.bfloat16)
    shard_chain(door, watch.chain, mp_policy=policy)
    unit: Any = watch.chain.units[0]
    with context.recorder.during(Phase.FORWARD, step=0):
        unit.unshard()
    entries = [e for e in watch.seen().entries if e.phase is Phase.FORWARD]
    return [e.dtype for e in entries], [str(p.dtype) for p in unit.parameters()]


@both_doors
def test_unshard_gathers_in_the_compute_dtype(door: str, tmp_path: Path) -> None:
    expected = (["bfloat16"], ["torch.bfloat16"] * 2)
    assert run(tmp_path, 2, _unshard_in_low_precision, door) == [expected] * 2


def _save_while_whole(context: RankContext, door: str) -> None:
    watch = Watch(context)
    model = shard_chain(BY_NAME[door], watch.chain, reshard_after_forward=False)
    watch.train()
    for module in (model, *watch.chain.units):
        module.unshard()
    assert watch.whole() == ALL
    saved = model.state_dict()
    assert list(saved) == list(Chain().state_dict())
    assert {type(value) for value in saved.values()} == {DTensor}
    assert not watch.whole(), "saving registers the shards"
    model.load_state_dict(saved)
    watch.train()


@both_doors
def test_a_state_dict_of_a_gathered_model_holds_shards(door: str, tmp_path: Path) -> None:
    run(tmp_path, 2, _save_while_whole, door)


def _async_everywhere(context: RankContext, door: str) -> tuple[set[bool], frozenset[int]]:
    watch = Watch(context)
    model = shard_chain(BY_NAME[door], watch.chain)
    model._set_unshard_async_op(True)
    for step in range(2):
        model.zero_grad()
        watch.train(step=step)
    assert_gradients(watch.chain, plain_gradients(2))
    gathers = [e for e in watch.seen().entries if e.op is Op.ALL_GATHER and e.phase is not Phase.PREPARE]
    return {e.is_async for e in gathers}, watch.whole()


@doors_with("_set_unshard_async_op")
def test_async_gathers_are_waited_for(door: str, tmp_path: Path) -> None:
    assert run(tmp_path, 2, _async_everywhere, door) == [({True}, frozenset())] * 2
