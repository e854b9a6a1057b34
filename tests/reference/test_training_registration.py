"""Which parameters a module shows when: shards outside of its forward and backward, whole ones where kept."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from harness.worlds.rank import RankContext
from harness.worlds.spec import WorldKind
from tests.reference.front_doors import BY_NAME, FrontDoor
from tests.reference.models import Pair, build, stack
from tests.reference.oracle import DOORS, Plan, loss_of, run_world

UNITS = ("0.inward", "0.outward", "")
# What reshard_after_forward=... means after forward, for units under the root and for the root.
KEPT: dict[str, tuple[dict[str, object], bool, bool]] = {
    "default": ({}, True, False),
    "true": ({"reshard_after_forward": True}, True, True),
    "false": ({"reshard_after_forward": False}, False, False),
    "two": ({"reshard_after_forward": 2}, True, True),
    "replicate": ({}, False, False),
}
MODES = list(KEPT)


def _plan(mode: str, *units: str) -> Plan:
    call = "replicate" if mode == "replicate" else "fully_shard"
    return Plan(units=units, options=KEPT[mode][0], call=call)  # type: ignore[arg-type] # str is not yet a Literal


def _input(context: RankContext, width: int = 3) -> torch.Tensor:
    return torch.randn(2, width, generator=torch.Generator().manual_seed(context.rank), dtype=torch.float64)


def _sharded(model: nn.Module) -> dict[str, bool]:
    return {name: isinstance(parameter, DTensor) for name, parameter in model.named_parameters()}


def _demand_values(model: nn.Module, whole: dict[str, torch.Tensor]) -> None:
    assert [name for name, _ in model.named_parameters()] == list(whole)
    for name, parameter in model.named_parameters():
        value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert isinstance(parameter, nn.Parameter), name
        assert parameter.shape == whole[name].shape
        assert torch.equal(value, whole[name]), name


def _registers(context: RankContext, door_name: str, mode: str, units: tuple[str, ...]) -> None:
    door = BY_NAME[door_name]
    plain = build(partial(stack, 3, (4, 4)))
    whole = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    model = _plan(mode, *units).apply(door, copy.deepcopy(plain), None)
    inner = tuple(unit + "." for unit in units if unit)
    _, units_are_sharded, root_is_sharded = KEPT[mode]

    for _ in range(2):
        assert all(_sharded(model).values())
        _demand_values(model, whole)
        loss = loss_of(model(_input(context)))
        assert _sharded(model) == {
            name: units_are_sharded if name.startswith(inner or ("?",)) else root_is_sharded for name in whole
        }
        _demand_values(model, whole)
        _reshard(door, model)
        assert all(_sharded(model).values()), "after reshard()"
        _demand_values(model, whole)
        _unshard(door, model)
        assert not any(_sharded(model).values()), "after unshard()"
        _demand_values(model, whole)
        loss.backward()
        assert all(_sharded(model).values()), "after backward"
        _demand_values(model, whole)


def _reshard(door: FrontDoor, model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, door.sharded_module):
            module.reshard()


def _unshard(door: FrontDoor, model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, door.sharded_module):
            assert module.unshard() is None


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("units", [("",), UNITS], ids=["one_unit", "three_units"])
def test_forward_leaves_whole_what_is_kept_and_backward_nothing(
    units: tuple[str, ...], mode: str, door: str, tmp_path: Path
) -> None:
    """Upstream rows T03, T04, R02, R03."""
    run_world(WorldKind.THREADS, 4, _registers, door, mode, units, folder=tmp_path)


def _contiguous(context: RankContext, door_name: str) -> None:
    door = BY_NAME[door_name]
    model = Plan(units=("inward", "outward", ""), options={"shard_placement_fn": _columns}).apply(
        door, build(partial(Pair, 4)), None
    )
    seen: list[bool] = []

    def look(module: nn.Module, _args: object) -> None:
        seen.extend(
            not isinstance(p, DTensor) and p.is_contiguous() for p in module.parameters(recurse=False)
        )

    for module in model.children():
        module.register_forward_pre_hook(look)
    for _ in range(3):
        loss_of(model(_input(context, 4))).backward()
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            assert parameter.placements == (Shard(1 if parameter.ndim == 2 else 0),), name
            assert isinstance(parameter.grad, DTensor)
            for tensor in (parameter, parameter.grad, parameter.to_local(), parameter.grad.to_local()):
                assert tensor.is_contiguous(), name
    assert seen == [True] * 12


def _columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 else None


@pytest.mark.parametrize("door", DOORS)
def test_columns_are_contiguous_everywhere(door: str, tmp_path: Path) -> None:
    """Upstream row T25."""
    run_world(WorldKind.THREADS, 4, _contiguous, door, folder=tmp_path)


def _to_float64(door: FrontDoor, model: nn.Module) -> None:
    model.to(torch.float64)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.dtype == parameter.to_local().dtype == torch.float64
        assert parameter._spec.tensor_meta is not None
        assert parameter._spec.tensor_meta.dtype == torch.float64


def _casts_after(context: RankContext, door_name: str, call: str) -> None:
    door = BY_NAME[door_name]
    rounded = build(partial(stack, 4, (3, 4)), dtype=torch.float32)
    model = copy.deepcopy(rounded)
    engage = getattr(door, call)
    for module in (*model.children(), model):
        engage(module)
    _to_float64(door, model)
    plain = rounded.to(torch.float64)
    for parameter, whole in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.full_tensor(), whole)  # type: ignore[attr-defined] # a DTensor
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2, foreach=True) for m in (model, plain)]
    for step in range(3):
        data = [_data(step, rank) for rank in range(context.size)]
        loss = loss_of(model(data[context.rank]))
        loss.backward()
        losses = [loss_of(plain(rows_)) for rows_ in data]
        (torch.stack(losses).sum() / context.size).backward()
        torch.testing.assert_close(loss, losses[context.rank], rtol=1e-10, atol=0)
        for parameter, whole in zip(model.parameters(), plain.parameters(), strict=True):
            assert isinstance(parameter.grad, DTensor)
            assert whole.grad is not None
            assert parameter.grad.dtype == torch.float64
            torch.testing.assert_close(parameter.grad.full_tensor(), whole.grad, rtol=1e-9, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        for parameter, whole in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.full_tensor(), whole, rtol=1e-9, atol=1e-12)  # type: ignore[attr-defined] # a DTensor


def _data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("call", ["fully_shard", "replicate"])
def test_a_cast_after_sharding_takes_everything_along(call: str, door: str, tmp_path: Path) -> None:
    """Upstream rows T06, R04."""
    run_world(WorldKind.THREADS, 2, _casts_after, door, call, folder=tmp_path)


def _optimizer_sees_shards(context: RankContext, door_name: str) -> None:
    door = BY_NAME[door_name]
    model = Plan(units=UNITS).apply(door, build(partial(stack, 3, (4, 4))), None)
    before = list(model.parameters())
    loss_of(model(_input(context))).backward()
    after = list(model.parameters())
    assert all(x is y for x, y in zip(before, after, strict=True)), (
        "a step gave the parameters new identities"
    )
    ids = {id(parameter) for parameter in before}
    assert {id(p) for group in torch.optim.SGD(after).param_groups for p in group["params"]} == ids


@pytest.mark.parametrize("door", DOORS)
def test_parameters_keep_their_identity(door: str, tmp_path: Path) -> None:
    """Else an optimizer made before the step would hold others (BUGS C6-03)."""
    run_world(WorldKind.THREADS, 2, _optimizer_sees_shards, door, folder=tmp_path)
