"""An engine in a life: optimizers of every make, engines beside it, methods other than forward, layer by layer."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from harness.tracing.journal import read_journal
from harness.tracing.ledger import Phase
from harness.worlds.rank import RankContext, journal_path
from harness.worlds.spec import WorldKind
from tests.reference.front_doors import BY_NAME, FrontDoor
from tests.reference.models import (
    LENGTH,
    MLP,
    TIED,
    TRANSFORMER,
    VOCABULARY,
    Choice,
    Mlp,
    Vision,
    build,
    stack,
)
from tests.reference.oracle import (
    DOORS,
    Args,
    Plan,
    Training,
    cases,
    compare_gradients,
    compare_parameters,
    images,
    in_turn,
    loss_of,
    on_doors,
    rows,
    run_world,
    tokens,
    train_beside_oracle,
)

LAYERS = ("layers.0", "layers.1", "layers.2", "")
Optimizers = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizers] = {
    "sgd_foreach": partial(torch.optim.SGD, lr=0.125, momentum=0.9, foreach=True),
    "sgd_for_loop": partial(torch.optim.SGD, lr=0.125, momentum=0.9, weight_decay=0.1, foreach=False),
    "adam_foreach": partial(torch.optim.Adam, lr=1e-2, foreach=True),
    "adamw_for_loop": partial(torch.optim.AdamW, lr=1e-2, foreach=False),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-1),
}


def _encode(door: FrontDoor, model: nn.Module) -> None:
    door.register_forward_method(model.get_submodule("encoder"), "encode")
    door.register_forward_method(nn.Linear(1, 1), "no_such_method")  # not a unit: nothing happens


@dataclass(frozen=True, slots=True)
class ChosenByRank:
    """Rows, and the branch that this rank takes."""

    num_branches: int = 2

    def __call__(self, generator: torch.Generator, rank: int) -> Args:
        return (*rows(5)(generator, rank), rank % self.num_branches)


def _reduces_unused(door: FrontDoor, model: nn.Module) -> None:
    assert isinstance(model, door.sharded_module)
    model.set_reduce_scatter_unused_params(True)


CHOICE = ("entry", "branches.0", "branches.1", "exit", "")
TRAININGS: dict[str, Training] = {
    **{
        name: Training(model=MLP, plan=Plan(units=LAYERS), optimizer=optimizer, num_steps=4)
        for name, optimizer in OPTIMIZERS.items()
    },
    "adam_offloaded": Training(
        model=MLP, plan=Plan(units=LAYERS, offload=True), optimizer=OPTIMIZERS["adam_foreach"]
    ),
    "sgd_foreach_replicas": Training(
        model=MLP, plan=Plan(units=LAYERS, call="replicate"), optimizer=OPTIMIZERS["sgd_foreach"]
    ),
    # T36, R16
    "method": Training(
        model=Vision, draw=images, plan=Plan(units=("encoder", "projector", ""), after=_encode)
    ),
    "method_replicas": Training(
        model=Vision,
        draw=images,
        plan=Plan(units=("encoder", "projector", ""), call="replicate", after=_encode),
    ),
    # Ranks that use different parameters of one unit, then of different units
    "branches_of_one_unit": Training(
        model=Choice, draw=ChosenByRank(), plan=Plan(after=_reduces_unused), zeroed=True
    ),
    "unused_everywhere": Training(
        model=Choice,
        draw=ChosenByRank(num_branches=1),
        plan=Plan(after=_reduces_unused),
        idle=("branches.1",),
        zeroed=True,
    ),
    "branches_of_one_unit_replicas": Training(
        model=Choice, draw=ChosenByRank(), plan=Plan(after=_reduces_unused, call="replicate"), zeroed=True
    ),
    "unused_without_asking": Training(
        model=Choice, draw=ChosenByRank(num_branches=1), plan=Plan(units=CHOICE), idle=("branches.1",)
    ),
}


@pytest.mark.parametrize(("name", "door"), cases(TRAININGS))
def test_trains_alike(name: str, door: str, tmp_path: Path) -> None:
    run_world(WorldKind.THREADS, 2, train_beside_oracle, door, TRAININGS[name], folder=tmp_path)


def _data(context: RankContext, step: int, width: int = 5) -> list[torch.Tensor]:
    """Draw every rank's rows of a step."""
    generators = [torch.Generator().manual_seed(100 * step + rank) for rank in range(context.size)]
    return [torch.randn(3, width, generator=g, dtype=torch.float64) for g in generators]


def _learn(plain: nn.Module, data: Sequence[torch.Tensor]) -> None:
    (torch.stack([loss_of(plain(x)) for x in data]).sum() / len(data)).backward()


class Sides(Enum):
    """How several roots live beside each other."""

    APART = auto()  # nothing shared, all forwards before all backwards
    IN_TURN = auto()  # communication state shared, one root's forward and backward after the other's
    SHARING = auto()  # communication state shared, all forwards before all backwards


def _two_roots(context: RankContext, door_name: str, sides: Sides) -> None:
    door = BY_NAME[door_name]
    plains = [build(MLP, seed) for seed in (1, 2, 3)]
    plan = Plan(units=LAYERS)
    models = [plan.apply(door, copy.deepcopy(plain), None) for plain in plains]
    if sides is not Sides.APART:
        door.share_comm_ctx(models)
        door.share_comm_ctx([])
        with pytest.raises(ValueError, match="FSDPModule"):
            door.share_comm_ctx([models[0], nn.Linear(1, 1)])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.125, momentum=0.9) for m in (*models, *plains)]
    for step in range(3):
        data = [_data(context, 10 * step + i) for i in range(3)]
        losses = []
        for model, of_model in zip(models, data, strict=True):
            losses.append(loss_of(model(of_model[context.rank])))
            if sides is Sides.IN_TURN:
                losses.pop().backward()
        for loss in losses[:: -1 if step % 2 else 1]:
            loss.backward()
        for model, plain, of_model in zip(models, plains, data, strict=True):
            _learn(plain, of_model)
            compare_gradients(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for model, plain in zip(models, plains, strict=True):
            compare_parameters(model, plain)


# What torch does where it fails, by the way the roots live.
SIDES = {
    Sides.APART: "",
    Sides.IN_TURN: "",
    Sides.SHARING: "the end of one root's backward clears the order of all, and the next root's raises IndexError",
}


@pytest.mark.parametrize(
    ("sides", "door"),
    [case for sides, reason in SIDES.items() for case in on_doors(sides, sides.name.lower(), reason)],
)
def test_roots_train_side_by_side(sides: Sides, door: str, tmp_path: Path) -> None:
    """Upstream row T37."""
    run_world(WorldKind.THREADS, 2, _two_roots, door, sides, folder=tmp_path)


def _stages(context: RankContext, door_name: str) -> None:
    """Chain three roots: the gradient of one's input is what the one before goes on from."""
    door = BY_NAME[door_name]
    plain = build(partial(stack, 5))
    model = copy.deepcopy(plain)
    for child in model.children():
        door.fully_shard(child)
    door.share_comm_ctx(list(model.children()))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.125, momentum=0.9) for m in (model, plain)]
    for step in range(3):
        data = _data(context, step)
        loss_of(model(data[context.rank])).backward()
        _learn(plain, data)
        compare_gradients(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        compare_parameters(model, plain)


@pytest.mark.parametrize("door", DOORS)
def test_roots_train_in_a_chain(door: str, tmp_path: Path) -> None:
    run_world(WorldKind.THREADS, 2, _stages, door, folder=tmp_path)


def _repeats(context: RankContext, door_name: str) -> None:
    door = BY_NAME[door_name]
    results = []
    for _ in range(2):
        model = Plan(units=("blocks.0", "blocks.1", "")).apply(door, build(TRANSFORMER), None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.9)
        for step in range(2):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + context.rank)
            loss_of(model(*tokens(generator, context.rank))).backward()
            optimizer.step()
        parts = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([t.to_local() for t in (*model.parameters(), *parts) if isinstance(t, DTensor)])
    first, second = results
    assert len(first) == len(second) > 20
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("door", DOORS)
def test_a_training_repeats_to_the_bit(door: str, tmp_path: Path) -> None:
    run_world(WorldKind.THREADS, 4, _repeats, door, folder=tmp_path)


def _steps_in_backward(context: RankContext, door_name: str, call: str, offload: bool) -> None:
    door = BY_NAME[door_name]
    plain = build(MLP)
    plan = Plan(units=LAYERS, call=call, offload=offload)  # type: ignore[arg-type] # str is not yet a Literal
    model = plan.apply(door, copy.deepcopy(plain), None)
    optimizers = {p: torch.optim.SGD([p], lr=0.125, momentum=0.9) for p in model.parameters()}
    seen: list[nn.Parameter] = []

    def step_now(parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter.grad, DTensor)
        seen.append(parameter)
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    of_plain = torch.optim.SGD(plain.parameters(), lr=0.125, momentum=0.9)
    for step in range(3):
        data = _data(context, step)
        loss_of(model(data[context.rank])).backward()
        _learn(plain, data)
        of_plain.step()
        of_plain.zero_grad()
        assert {id(p) for p in seen} == {id(p) for p in optimizers}
        assert len(seen) == len(optimizers), "a hook ran twice"
        assert all(p.grad is None for p in model.parameters())
        seen.clear()
        compare_parameters(model, plain)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("call", ["fully_shard", "replicate"])
@pytest.mark.parametrize("offload", [False, True], ids=["", "offloaded"])
def test_an_optimizer_may_step_in_backward(offload: bool, call: str, door: str, tmp_path: Path) -> None:
    run_world(WorldKind.THREADS, 2, _steps_in_backward, door, call, offload, folder=tmp_path)


def _all_rows_change(context: RankContext, door_name: str, raf: bool) -> None:
    model = Plan(units=(("token", "head"), ""), options={"reshard_after_forward": raf}).apply(
        BY_NAME[door_name], build(TIED), None
    )
    before = _whole(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + context.rank)
        ids = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
        functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.get_submodule("head").weight is model.get_submodule("token").weight
    assert before.shape == (VOCABULARY, 8)
    assert (before != _whole(model)).any(dim=1).all()


def _whole(model: nn.Module) -> torch.Tensor:
    weight = model.get_submodule("head").weight
    assert isinstance(weight, DTensor)
    return weight.full_tensor().detach().clone()


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("raf", [True, False], ids=["reshard", "keep"])
def test_every_row_of_a_tied_weight_learns(raf: bool, door: str, tmp_path: Path) -> None:
    """Upstream row T27."""
    run_world(WorldKind.THREADS, 4, _all_rows_change, door, raf, folder=tmp_path)


def _two_groups(context: RankContext, door_name: str) -> None:
    door = BY_NAME[door_name]
    model = build(TIED)
    for name in ("token", "head"):
        door.fully_shard(model.get_submodule(name))
    door.fully_shard(model)
    with pytest.raises(ValueError, match="already managed by another"):
        model(torch.zeros(1, 2, dtype=torch.int64))


@pytest.mark.parametrize("door", DOORS)
def test_a_parameter_has_one_unit(door: str, tmp_path: Path) -> None:
    """Upstream row T28."""
    run_world(WorldKind.THREADS, 2, _two_groups, door, folder=tmp_path)


def _layer_by_layer(context: RankContext, door_name: str) -> None:
    door = BY_NAME[door_name]
    plains, layers = [], []
    for seed in range(8):
        layer = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 5, bias=False))
        plains.append(build(lambda layer=layer: layer, seed))  # type: ignore[misc] # a default binds it
        layers.append(door.fully_shard(copy.deepcopy(plains[-1])))
        gc.collect()
    model, plain = door.fully_shard(nn.Sequential(*layers)), nn.Sequential(*plains)
    data = _data(context, 0)
    loss_of(model(data[context.rank])).backward()
    _learn(plain, data)
    compare_gradients(model, plain)


@pytest.mark.parametrize("door", DOORS)
def test_layers_may_be_made_and_sharded_one_by_one(door: str, tmp_path: Path) -> None:
    """Upstream row T29."""
    run_world(WorldKind.THREADS, 2, _layer_by_layer, door, folder=tmp_path)


def _alone(context: RankContext, door_name: str, call: str) -> None:
    door = BY_NAME[door_name]
    plain = build(partial(Mlp, 5, 15, 8, 3))
    plan = Plan(units=("layers.0", "layers.1", ""), call=call)  # type: ignore[arg-type] # str is not yet a Literal
    model = plan.apply(door, copy.deepcopy(plain), None)
    for step in range(3):
        for m in (model, plain):
            m.zero_grad(set_to_none=step % 2 == 0)
        data = _data(context, step)
        with context.recorder.during(Phase.STEP, step=step):
            loss_of(model(data[0])).backward()
        _learn(plain, data)
        compare_gradients(model, plain)


@pytest.mark.parametrize(
    ("call", "door"),
    [
        *on_doors("fully_shard", "fully_shard", ""),
        *on_doors("replicate", "replicate", "it all-reduces among one rank"),
    ],
)
def test_one_rank_talks_to_nobody(call: str, door: str, tmp_path: Path) -> None:
    """Upstream row T38."""
    run_world(WorldKind.THREADS, 1, _alone, door, call, folder=tmp_path)
    assert [entry for entry in read_journal(journal_path(tmp_path, 0)).ledger if entry.step is not None] == []


def _edits_between(context: RankContext, door_name: str, raf: bool) -> None:
    """Change parameters in place between steps: the next forward must see it, whatever was kept whole."""
    plain = build(MLP)
    model = Plan(units=LAYERS, options={"reshard_after_forward": raf}).apply(
        BY_NAME[door_name], copy.deepcopy(plain), None
    )
    for step in range(3):
        data = _data(context, step)
        loss = loss_of(model(data[context.rank]))
        torch.testing.assert_close(loss, loss_of(plain(data[context.rank])), rtol=1e-10, atol=0)
        loss.backward()
        with torch.no_grad():
            for parameter in (*model.parameters(), *plain.parameters()):
                parameter.mul_(1.5).add_(0.25)
        compare_parameters(model, plain)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("raf", [True, False], ids=["reshard", "keep"])
def test_the_next_forward_sees_the_parameters_of_now(raf: bool, door: str, tmp_path: Path) -> None:
    run_world(WorldKind.THREADS, 3, _edits_between, door, raf, folder=tmp_path)


def _eager_state(context: RankContext, door_name: str) -> None:
    """Build an optimizer whose state is made at once, and after a forward that kept the root whole."""
    plain = build(MLP)
    model: Any = Plan(units=LAYERS).apply(BY_NAME[door_name], copy.deepcopy(plain), None)
    in_turn(model, [(_data(context, 0)[context.rank],)], None)
    model.zero_grad()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.125) for m in (model, plain)]
    for step in range(2):
        data = _data(context, step)
        loss_of(model(data[context.rank])).backward()
        _learn(plain, data)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        compare_parameters(model, plain)


@pytest.mark.parametrize("door", DOORS)
def test_an_optimizer_may_come_late(door: str, tmp_path: Path) -> None:
    run_world(WorldKind.THREADS, 2, _eager_state, door, folder=tmp_path)
