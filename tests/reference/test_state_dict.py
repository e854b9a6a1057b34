"""What a sharded model says of its state and takes back: from world to world, whole or in shards, at any moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from harness.worlds.launch import launch
from harness.worlds.outcome import Raised, causal
from harness.worlds.rank import RankContext
from harness.worlds.spec import WorldKind, WorldSpec
from tests.reference.front_doors import BY_NAME
from tests.values import keep_value, kept_values

NUM_ROWS = 12  # divisible by every world size here, so that the mean of the ranks' means is the batch's
# Float64 everywhere; only the order of summation differs. AdamW's root and division magnify it somewhat.
TOLERANCE = 1e-10

each_door = pytest.mark.parametrize("door", BY_NAME)


class Optimizer(StrEnum):
    """How to train: one optimizer whose state has a scalar, one whose state has not."""

    ADAMW = "adamw"
    MOMENTUM = "momentum"

    def over(self, module: nn.Module) -> torch.optim.Optimizer:
        """Build it for what the module trains."""
        trained = [p for p in module.parameters() if p.requires_grad]
        if self is Optimizer.ADAMW:
            return torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=0.01)


class Net(nn.Module):
    """No world divides its sizes, ``last`` has fewer rows than a world of four; the root owns ``middle``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.middle = nn.Linear(7, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map rows of five to rows of three."""
        output: torch.Tensor = self.last(torch.tanh(self.middle(torch.tanh(self.first(rows)))))
        return output


class TiedNet(nn.Module):
    """``reader`` and ``writer`` are one weight, owned by the root; ``inner`` is a unit with a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = nn.Linear(5, 7, bias=False)
        self.inner = nn.Linear(5, 5)
        self.writer = nn.Linear(5, 7, bias=False)
        self.writer.weight = self.reader.weight
        self.inner.weight.requires_grad_(False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map rows of five to rows of seven, through the same weight twice."""
        inner = torch.tanh(self.inner(torch.tanh(self.reader(rows)) @ self.reader.weight))
        output: torch.Tensor = self.writer(inner)
        return output


UNITS: Mapping[type[nn.Module], tuple[str, ...]] = {Net: ("first", "last"), TiedNet: ("inner",)}


def _plain(kind: type[nn.Module], *, seed: int = 0) -> nn.Module:
    """Build a whole model in float64; the seed decides every value."""
    model = kind().double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5, generator=generator)
    return model


# Any: the two engines' sharded modules share no base class.
def _sharded(door: str, kind: type[nn.Module], mesh: DeviceMesh, *, seed: int = 0, **options: object) -> Any:
    model = _plain(kind, seed=seed)
    for name in UNITS[kind]:
        BY_NAME[door].fully_shard(model.get_submodule(name), mesh=mesh, **options)
    return BY_NAME[door].fully_shard(model, mesh=mesh, **options)


def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def _loss(model: nn.Module, step: int, *, rank: int = 0, size: int = 1) -> torch.Tensor:
    """Give a rank's part of the loss of a step's global batch."""
    generator = torch.Generator().manual_seed(step)
    batch = torch.randn(NUM_ROWS, 5, dtype=torch.float64, generator=generator)
    loss: torch.Tensor = model(batch.chunk(size)[rank]).square().mean()
    return loss


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, *, rank: int = 0, size: int = 1
) -> None:
    for step in steps:
        _loss(model, step, rank=rank, size=size).backward()
        optimizer.step()
        optimizer.zero_grad()


def _oracle(kind: type[nn.Module], optimizer: Optimizer, num_steps: int) -> nn.Module:
    """Train a whole model on whole batches, in one process."""
    model = _plain(kind)
    _train(model, optimizer.over(model), range(num_steps))
    return model


def _assert_is(sharded: nn.Module, whole: nn.Module) -> None:
    """Hold every parameter's shard on this rank, and its whole value, to a model that no engine touched."""
    __tracebackhide__ = True
    expected = dict(whole.named_parameters())
    assert [name for name, _ in sharded.named_parameters()] == list(expected)
    for name, parameter in sharded.named_parameters():
        _assert_value(name, parameter, expected[name])


def _assert_value(name: str, found: object, expected: torch.Tensor) -> None:
    __tracebackhide__ = True
    assert isinstance(found, DTensor), f"{name}: expected a DTensor, got {type(found).__name__}"
    shard = distribute_tensor(expected.detach(), found.device_mesh, found.placements).to_local()
    for what, ours, theirs in (("shard", found.to_local(), shard), ("whole", found.full_tensor(), expected)):
        told = f"{what} of {name}: expected {theirs}, got {ours}"
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE, msg=told)


def _launch(kind: WorldKind, size: int, body: Callable[..., Any], *args: object, folder: Path) -> list[Any]:
    """Run a body on every rank and give what each returned; shows the cause where one did not."""
    __tracebackhide__ = True
    result = launch(WorldSpec(kind=kind, size=size), keep_value, body, *args, folder=folder)
    cause = causal(result)
    assert result.is_clean, cause.traceback if isinstance(cause, Raised) else (cause, result.leaks)
    return kept_values(folder, size)


# --- from world to world ------------------------------------------------------------------------------------------


def _save_after_two_steps(
    context: RankContext, door: str, kind: type[nn.Module], optimizer: Optimizer, shape: tuple[int, ...]
) -> None:
    model = _sharded(door, kind, _mesh(shape))
    optim = optimizer.over(model)
    _train(model, optim, range(2), rank=context.rank, size=context.size)
    state, optim_state = get_state_dict(model, optim)
    save({"model": state, "optim": optim_state}, checkpoint_id=context.folder / "checkpoint")


def _load_and_train_the_third(
    context: RankContext,
    door: str,
    kind: type[nn.Module],
    optimizer: Optimizer,
    checkpoint: Path,
) -> None:
    model = _sharded(door, kind, _mesh((context.size,)), seed=1)
    optim = optimizer.over(model)
    state, optim_state = get_state_dict(model, optim)
    loaded: dict[str, Any] = {"model": state, "optim": optim_state}  # Any: the loader fills both in place
    load(loaded, checkpoint_id=checkpoint)
    set_state_dict(model, optim, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
    _assert_is(model, _oracle(kind, optimizer, 2))
    _train(model, optim, range(2, 3), rank=context.rank, size=context.size)
    _assert_is(model, _oracle(kind, optimizer, 3))


def _carry_over(
    world: WorldKind,
    door: str,
    kind: type[nn.Module],
    optimizer: Optimizer,
    shape: tuple[int, ...],
    folder: Path,
) -> None:
    saved = folder / "4"
    _launch(world, 4, _save_after_two_steps, door, kind, optimizer, shape, folder=saved)
    for size in (2, 3):
        load = (_load_and_train_the_third, door, kind, optimizer, saved / "checkpoint")
        _launch(world, size, *load, folder=folder / str(size))


@each_door
@pytest.mark.parametrize("optimizer", Optimizer)
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_a_checkpoint_is_trained_on_in_worlds_of_other_sizes(
    door: str, optimizer: Optimizer, shape: tuple[int, ...], tmp_path: Path
) -> None:
    _carry_over(WorldKind.THREADS, door, Net, optimizer, shape, tmp_path)


@each_door
def test_a_checkpoint_is_trained_on_where_ranks_are_processes(door: str, tmp_path: Path) -> None:
    _carry_over(WorldKind.PROCESSES, door, Net, Optimizer.ADAMW, (4,), tmp_path)


@each_door
def test_tied_and_frozen_parameters_go_through_a_checkpoint(door: str, tmp_path: Path) -> None:
    _carry_over(WorldKind.THREADS, door, TiedNet, Optimizer.ADAMW, (4,), tmp_path)


# --- whole --------------------------------------------------------------------------------------------------------

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=True)


def _gather_and_load_back(context: RankContext, door: str, optimizer: Optimizer) -> None:
    mesh = _mesh((context.size,))
    model = _sharded(door, Net, mesh)
    optim = optimizer.over(model)
    _train(model, optim, range(2), rank=context.rank, size=context.size)
    state, optim_state = get_state_dict(model, optim, options=WHOLE)
    oracle = _oracle(Net, optimizer, 2)
    if context.rank == 0:
        torch.testing.assert_close(state, dict(oracle.state_dict()), rtol=TOLERANCE, atol=TOLERANCE)
    else:
        assert not state, "cpu_offload of a full state dict is for rank 0 alone"

    fresh = _sharded(door, Net, mesh, seed=1)
    fresh_optim = optimizer.over(fresh)
    # Not set_state_dict: it takes the empty model state of the other ranks for "optimizer only", and rank 0 hangs.
    set_model_state_dict(fresh, state, options=FROM_RANK_0)
    set_optimizer_state_dict(fresh, fresh_optim, optim_state, options=FROM_RANK_0)
    _assert_is(fresh, oracle)
    _train(fresh, fresh_optim, range(2, 3), rank=context.rank, size=context.size)
    _assert_is(fresh, _oracle(Net, optimizer, 3))


@each_door
@pytest.mark.parametrize("optimizer", Optimizer)
def test_a_full_state_dict_is_gathered_and_loaded_from_rank_0(
    door: str, optimizer: Optimizer, tmp_path: Path
) -> None:
    _launch(WorldKind.THREADS, 3, _gather_and_load_back, door, optimizer, folder=tmp_path)


def _load_what_is_incomplete(context: RankContext, door: str) -> None:
    model = _sharded(door, Net, _mesh((context.size,)))
    state = model.state_dict()
    del state["last.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key.*last\.bias"):
        model.load_state_dict(state)
    missing = model.load_state_dict({**state, "extra": torch.ones(1)}, strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["last.bias"], ["extra"])
    _assert_is(model, _plain(Net))


@each_door
def test_strict_loading_names_what_is_missing(door: str, tmp_path: Path) -> None:
    _launch(WorldKind.THREADS, 2, _load_what_is_incomplete, door, folder=tmp_path)


# --- plain state_dict and load_state_dict -------------------------------------------------------------------------


def _assert_state_is(state: Mapping[str, object], whole: nn.Module) -> None:
    __tracebackhide__ = True
    expected = whole.state_dict()
    assert list(state) == list(expected)
    for name, found in state.items():
        _assert_value(name, found, expected[name])


def _speak_at_every_moment(context: RankContext, door: str, reshard: bool, shape: tuple[int, ...]) -> None:
    model = _sharded(door, Net, _mesh(shape), reshard_after_forward=reshard)
    plain = _plain(Net)
    _assert_state_is(model.state_dict(), plain)
    loss = _loss(model, 0, rank=context.rank, size=context.size)
    _assert_state_is(model.state_dict(), plain)
    loss.backward()
    _assert_state_is(model.state_dict(), plain)
    Optimizer.MOMENTUM.over(model).step()
    _assert_state_is(model.state_dict(), _oracle(Net, Optimizer.MOMENTUM, 1))
    with torch.no_grad():
        model(torch.ones(2, 5, dtype=torch.float64))
    _assert_state_is(model.state_dict(), _oracle(Net, Optimizer.MOMENTUM, 1))
    model.unshard()
    _assert_state_is(model.state_dict(), _oracle(Net, Optimizer.MOMENTUM, 1))


@each_door
@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=str)
@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
def test_state_dict_gives_shards_at_every_moment(
    door: str, reshard: bool, shape: tuple[int, ...], tmp_path: Path
) -> None:
    size = torch.Size(shape).numel()
    _launch(WorldKind.THREADS, size, _speak_at_every_moment, door, reshard, shape, folder=tmp_path)


class Moment(StrEnum):
    """When a state is loaded."""

    BEFORE_FORWARD = "before forward"  # nothing ran yet
    AFTER_FORWARD = "after forward"  # without gradients, and parameters stay whole
    AFTER_TRAINING = "after training"  # gradients were there, and an optimizer stepped


def _load(context: RankContext, door: str, moment: Moment, assign: bool) -> None:
    mesh = _mesh((context.size,))
    trained = _sharded(door, Net, mesh)
    _train(trained, Optimizer.MOMENTUM.over(trained), range(1), rank=context.rank, size=context.size)
    model = _sharded(door, Net, mesh, seed=1, reshard_after_forward=False)
    match moment:
        case Moment.BEFORE_FORWARD:
            pass
        case Moment.AFTER_FORWARD:
            with torch.no_grad():
                _loss(model, 5, rank=context.rank, size=context.size)
        case Moment.AFTER_TRAINING:
            _train(model, Optimizer.ADAMW.over(model), range(5, 7), rank=context.rank, size=context.size)
    state = {name: value.detach().clone() for name, value in trained.state_dict().items()}
    model.load_state_dict(state, assign=assign)
    _assert_is(model, _oracle(Net, Optimizer.MOMENTUM, 1))
    # The oracle's one step had a momentum of nothing before it, so two fresh optimizers do as one step each.
    oracle = _oracle(Net, Optimizer.MOMENTUM, 1)
    _train(oracle, Optimizer.MOMENTUM.over(oracle), range(1, 3))
    _train(model, Optimizer.MOMENTUM.over(model), range(1, 3), rank=context.rank, size=context.size)
    _assert_is(model, oracle)


@each_door
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("moment", Moment)
def test_a_loaded_state_is_what_is_trained_on(
    door: str, moment: Moment, assign: bool, tmp_path: Path
) -> None:
    _launch(WorldKind.THREADS, 3, _load, door, moment, assign, folder=tmp_path)


def _load_on_meta(context: RankContext, door: str) -> None:
    mesh = _mesh((context.size,))
    state = {name: value.detach().clone() for name, value in _sharded(door, Net, mesh).state_dict().items()}
    with torch.device("meta"):
        model = Net().double()
    for module in (model.first, model.last, model):
        BY_NAME[door].fully_shard(module, mesh=mesh)
    model.load_state_dict(state, assign=True)
    _train(model, Optimizer.ADAMW.over(model), range(2), rank=context.rank, size=context.size)
    _assert_is(model, _oracle(Net, Optimizer.ADAMW, 2))


@each_door
def test_a_model_on_meta_is_made_real_by_loading(door: str, tmp_path: Path) -> None:
    _launch(WorldKind.THREADS, 3, _load_on_meta, door, folder=tmp_path)


# --- optimizer state ----------------------------------------------------------------------------------------------


def _optimizer_state(context: RankContext, door: str, shape: tuple[int, ...]) -> None:
    model = _sharded(door, Net, _mesh(shape))
    optim = Optimizer.ADAMW.over(model)
    _train(model, optim, range(2), rank=context.rank, size=context.size)
    state: Any = get_optimizer_state_dict(model, optim)[
        "state"
    ]  # Any: keyed by name, then by AdamW's own keys
    parameters = dict(model.named_parameters())
    whole = _plain(Net)
    whole_optim = Optimizer.ADAMW.over(whole)
    _train(whole, whole_optim, range(2))
    assert list(state) == list(parameters)
    for name, expected in whole.named_parameters():
        assert set(state[name]) == {"step", "exp_avg", "exp_avg_sq"}
        assert state[name]["step"] == 2
        for key in ("exp_avg", "exp_avg_sq"):
            assert state[name][key].placements == parameters[name].placements
            _assert_value(f"{key} of {name}", state[name][key], whole_optim.state[expected][key])


@each_door
@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=str)
def test_optimizer_state_is_sharded_as_its_parameters(
    door: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    size = torch.Size(shape).numel()
    _launch(WorldKind.THREADS, size, _optimizer_state, door, shape, folder=tmp_path)


# --- tied and frozen ----------------------------------------------------------------------------------------------


def _tied_and_frozen(context: RankContext, door: str) -> None:
    model = _sharded(door, TiedNet, _mesh((context.size,)))
    before = _plain(TiedNet)
    state = model.state_dict()
    _assert_state_is(state, before)
    assert {"reader.weight", "writer.weight"} <= set(state)
    other = _sharded(door, TiedNet, _mesh((context.size,)), seed=1)
    other.load_state_dict(state)
    assert other.writer.weight is other.reader.weight
    assert not other.inner.weight.requires_grad
    _train(other, Optimizer.ADAMW.over(other), range(2), rank=context.rank, size=context.size)
    _assert_is(other, _oracle(TiedNet, Optimizer.ADAMW, 2))
    _assert_value("frozen", other.inner.weight, before.get_parameter("inner.weight"))


@each_door
def test_tied_stays_tied_and_frozen_stays_frozen(door: str, tmp_path: Path) -> None:
    _launch(WorldKind.THREADS, 3, _tied_and_frozen, door, folder=tmp_path)
