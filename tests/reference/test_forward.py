"""Arguments and results of forwards and the order of passes change no number of one plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.harness.worlds.rank import RankContext
from tests.reference.models import BY_NAME, assert_gradients, each_api, whole
from tests.reference.ranks import Ranks

Rows = Sequence[torch.Tensor]  # one tensor for each microbatch
Schedule = Callable[
    [nn.Module, Rows], list[torch.Tensor]
]  # one iteration; returns the expected values of each rank


# --- orders of passes ---------------------------------------------------------------------------------------------


def _loss(output: object) -> torch.Tensor:
    """Weigh all tensors of an output differently, so that swapped tensors change the loss."""
    parts = [t.square().mean() * (i + 1) + t.mean() for i, t in enumerate(_tensors(output))]
    return torch.stack(parts).sum()


def in_turn(model: nn.Module, rows: Rows) -> list[torch.Tensor]:
    """Forward and backward of one microbatch after the other."""
    losses = [_loss_after_backward(model, x) for x in rows]
    return [loss.detach() for loss in losses]


def _loss_after_backward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = _loss(model(x))
    loss.backward()
    return loss


def backward_twice(model: nn.Module, rows: Rows) -> list[torch.Tensor]:
    """Walk one graph twice: the gradients double."""
    for x in rows:
        loss = _loss(model(x))
        loss.backward(retain_graph=True)
        loss.backward()
    return [loss.detach()]


def input_gradients(model: nn.Module, rows: Rows) -> list[torch.Tensor]:
    """Let gradients flow into the inputs, which each rank keeps for itself."""
    inputs = [x.clone().requires_grad_() for x in rows]
    in_turn(model, inputs)
    return [x.grad for x in inputs if x.grad is not None]


def gradients_of_inputs_alone(model: nn.Module, rows: Rows) -> list[torch.Tensor]:
    """Ask autograd for input gradients alone, without gradients of parameters; then train as usual."""
    asked: list[torch.Tensor] = []
    for x in rows:
        inputs = x.clone().requires_grad_()
        asked += torch.autograd.grad(_loss(model(inputs)), [inputs])
    return [*asked, *in_turn(model, rows)]


def forward_and_forget(model: nn.Module, rows: Rows) -> list[torch.Tensor]:
    """Run a forward with a graph that no backward ever walks, then train."""
    forgotten = [_loss(model(x)).detach() for x in rows]
    return [*forgotten, *in_turn(model, rows)]


def child_then_root(model: nn.Module, rows: Rows) -> list[torch.Tensor]:
    """Train the first unit through itself once the root has run."""
    return [*in_turn(model, rows), *in_turn(model.get_submodule("0"), rows)]


SCHEDULES = (
    backward_twice,
    input_gradients,
    gradients_of_inputs_alone,
    forward_and_forget,
    child_then_root,
)


# --- models -------------------------------------------------------------------------------------------------------


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 3))


@dataclass
class Scores:
    """An input or output that is neither tensor nor container known to torch."""

    main: torch.Tensor
    label: str
    aside: torch.Tensor


def _tensors(value: object) -> list[torch.Tensor]:
    match value:
        case torch.Tensor():
            return [value]
        case dict():
            return [t for item in value.values() for t in _tensors(item)]
        case list() | tuple():
            return [t for item in value for t in _tensors(item)]
        case Scores():
            return [value.main, value.aside]
    return []


class Fork(nn.Module):
    """Two layers side by side, whose outputs are returned in a container of some kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.left, self.right = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, rows: torch.Tensor) -> object:
        left, right = torch.tanh(self.left(rows)), torch.tanh(self.right(rows))
        match self.kind:
            case "tuple":
                return left, (right, "a word", None)
            case "dict":
                return {"left": left, "right": [right], "count": 3}
        return Scores(main=left, label="a word", aside=right)


class Nested(nn.Module):
    """A unit's output in one container is opened and made the input of another."""

    def __init__(self, inner: str, outer: str) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.inner, self.outer = Fork(inner), Fork(outer)

    def forward(self, rows: torch.Tensor) -> object:
        left, right = _tensors(self.inner(torch.tanh(self.first(rows))))
        return self.outer(left * right)


class Gate(nn.Module):
    """Returns its very input, and a function of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(5))

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rows, torch.tanh(rows * self.weight)


class Passing(nn.Module):
    """A unit that returns its input unchanged, between two that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(5, 5), Gate(), nn.Linear(5, 5)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden, weighed = self.gate(torch.tanh(self.first(rows)))
        output: torch.Tensor = self.last(hidden + weighed)
        return output


class NoRows(nn.Module):
    """Owns nothing but a parameter without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, 5))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + (rows @ self.weight.T).sum(1, keepdim=True)


def _empty() -> nn.Module:
    """Put a parameter without rows into a unit of its own, and into a unit with others."""
    return nn.Sequential(nn.Linear(5, 5), NoRows(), nn.Sequential(NoRows(), nn.Linear(5, 1)))


# --- trainings ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A model, its units beside the root, and its iteration."""

    model: Callable[[], nn.Module]
    units: tuple[str, ...] = ()
    schedule: Schedule = in_turn
    call: str = "fully_shard"
    reshard: bool | int | None = None


LAYERS = ("0", "2")
TRAININGS: dict[str, Training] = {
    **{s.__name__: Training(model=_mlp, units=LAYERS, schedule=s) for s in SCHEDULES},
    **{
        f"{s.__name__}-freed": Training(model=_mlp, units=LAYERS, schedule=s, reshard=True) for s in SCHEDULES
    },
    **{
        f"{s.__name__}-replicas": Training(model=_mlp, units=LAYERS, schedule=s, call="replicate")
        for s in SCHEDULES
    },
    "backward_twice-parts": Training(model=_mlp, units=LAYERS, schedule=backward_twice, reshard=2),
    **{
        f"{inner}-inside-{outer}": Training(
            model=partial(Nested, inner, outer), units=("first", "inner", "outer")
        )
        for inner, outer in (("tuple", "dict"), ("dict", "dataclass"), ("dataclass", "tuple"))
    },
    "passing-an-input-on": Training(model=Passing, units=("first", "gate", "last")),
}
# torch's reduce-scatter raises `_chunk_cat expects non-empty tensor`.
EMPTY = {call: Training(model=_empty, units=("1", "2"), call=call) for call in ("fully_shard", "replicate")}


def _rows(step: int, rank: int) -> Rows:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2, 3, 5, generator=generator, dtype=torch.float64).unbind()


def _trains_alike(context: RankContext, api: str, table: str, name: str) -> None:
    training = {"all": TRAININGS, "empty": EMPTY}[table][name]
    torch.manual_seed(0)
    plain = training.model().double()
    model = copy.deepcopy(plain)
    options = {} if training.call == "replicate" else {"reshard_after_forward": training.reshard}
    for unit in (*training.units, ""):
        getattr(BY_NAME[api], training.call)(model.get_submodule(unit), **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.125, momentum=0.9) for m in (model, plain)]
    for step in range(3):
        seen = training.schedule(model, _rows(step, context.rank))
        plain.zero_grad()
        expected = [training.schedule(plain, _rows(step, rank)) for rank in range(context.size)]
        torch.testing.assert_close(seen, expected[context.rank], rtol=1e-9, atol=1e-12)
        means = {n: p.grad / context.size for n, p in plain.named_parameters() if p.grad is not None}
        assert_gradients(model, means)
        for parameter in plain.parameters():
            assert parameter.grad is not None
            assert parameter.grad.any() or not parameter.numel(), "nothing to compare"
            parameter.grad /= context.size
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(mine), theirs, rtol=1e-9, atol=1e-12)


@each_api
@pytest.mark.parametrize("name", TRAININGS)
def test_trains_as_one_plain_model_does(name: str, api: str, ranks: Ranks) -> None:
    ranks.run(4 if TRAININGS[name].reshard == 2 else 2, _trains_alike, api, "all", name)


@pytest.mark.parametrize("call", EMPTY)
def test_a_parameter_without_rows_trains(call: str, ranks: Ranks) -> None:
    ranks.run(2, _trains_alike, "reference", "empty", call)


# --- casts --------------------------------------------------------------------------------------------------------


class Containers(nn.Module):
    """A unit whose inputs are floats in containers, among objects that no cast may change."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.seen: dict[str, object] = {}

    def forward(self, table: dict[str, Any], pair: tuple[Any, ...], *, scores: Scores) -> object:
        floats = [table["rows"], table["list"][0], pair[0], scores.main, scores.aside]
        self.seen = {
            "floats": {x.dtype for x in floats},
            "others": (table["ids"].dtype, pair[1].dtype, pair[2], scores.label),
            "weight": self.weight.dtype,
        }
        total = torch.stack(floats).sum(0)
        return {"whole": total * self.weight, "ids": table["ids"], "more": (total.sum() * self.weight,)}


def _casts(context: RankContext, api_name: str, casts: bool) -> None:
    api = BY_NAME[api_name]
    policy = api.mixed_precision(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        output_dtype=torch.float64,
        cast_forward_inputs=casts,
    )
    model = api.fully_shard(Containers(), mp_policy=policy)
    leaves = [torch.full((2, 3), float(i + 1), requires_grad=True) for i in range(5)]
    rows, listed, in_tuple, main, aside = leaves
    table = {"rows": rows, "list": [listed], "ids": torch.arange(2)}
    scores = Scores(main=main, label="a word", aside=aside)
    output = model(table, (in_tuple, torch.tensor([True]), "a word"), scores=scores)
    assert model.seen == {
        "floats": {torch.bfloat16 if casts else torch.float32},
        "others": (torch.int64, torch.bool, "a word", "a word"),
        "weight": torch.bfloat16,
    }
    assert [t.dtype for t in _tensors(output)] == [torch.float64, torch.int64, torch.float64]
    assert [leaf.dtype for leaf in leaves] == [torch.float32] * 5, "the caller's tensors changed"
    torch.stack([t.sum() for t in _tensors(output) if t.is_floating_point()]).sum().backward()
    assert all(leaf.grad is not None and leaf.grad.dtype == torch.float32 for leaf in leaves)
    assert isinstance(model.weight.grad, DTensor)
    assert model.weight.grad.full_tensor().tolist() == [30.0 + 90.0] * 3


@each_api
@pytest.mark.parametrize("casts", [True, False], ids=["cast", "left"])
def test_containers_are_searched_for_floats(casts: bool, api: str, ranks: Ranks) -> None:
    ranks.run(2, _casts, api, casts)
