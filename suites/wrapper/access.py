"""Exercises of how a wrapped model is reached: its module, attributes, units, names, calls and conversions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from shardproof import InterfaceBench
from suites.wrapper.claims import Claims
from suites.wrapper.specimens import (
    UNITS,
    WRAPPED,
    Form,
    Tower,
    batch,
    parameters,
    summoned,
    tower,
    train,
    trained_alone,
    wrapped,
)

__all__ = [
    "Conversion",
    "apply_to_all",
    "apply_while_it_runs",
    "call_with_keywords",
    "convert",
    "convert_after_a_forward",
    "list_units",
    "list_units_of_others",
    "name_buffers",
    "name_flat_parameters",
    "name_parameters",
    "reach_attributes",
    "reach_items",
    "reach_module",
    "tell_the_root",
]


def reach_module(bench: InterfaceBench) -> None:
    """Note what the wrapper of the root, and of a unit inside it, say that they wrap."""
    claims = Claims(bench)
    model = tower()
    middle = model.middle
    root = wrapped(bench, model)
    claims.same("the module of the root", root.module is model, True)
    claims.same("the module of a unit", root.middle.module is middle, True)


def reach_attributes(bench: InterfaceBench) -> None:
    """Note what is found through the wrapper by name."""
    claims = Claims(bench)
    model = tower()
    stem = model.stem
    root = wrapped(bench, model)
    claims.same("a submodule", root.stem is stem, True)
    claims.same("a plain attribute", getattr(root, "kind", None), "tower")
    describe = getattr(root, "describe", str)
    claims.same("a method", describe("of rank"), "tower of rank")
    claims.same("a buffer", root.offset, torch.tensor([3.0]))
    claims.refuses("an attribute that nobody has", lambda: root.nothing, AttributeError)


def reach_items(bench: InterfaceBench) -> None:
    """Note what is found by index through the wrapper of a list of modules."""
    claims = Claims(bench)
    layers = [nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)]
    chain = wrapped(bench, nn.Sequential(*layers), units=("2",))
    claims.same(
        "an item", [chain[0] is layers[0], chain[1] is layers[1], chain[-1].module is layers[2]], [True] * 3
    )
    claims.same("a slice", [type(module) for module in chain[:2]], [nn.Linear, nn.ReLU])


def tell_the_root(bench: InterfaceBench) -> None:
    """Note who says that it is the root before any forward, and after one."""
    claims = Claims(bench)
    root = wrapped(bench, tower())
    units = [root, root.middle, root.middle[1]]
    claims.same("the root before forward", [unit.check_is_root() for unit in units], [True, False, False])
    root(batch(bench.rank))
    claims.same("the root after forward", [unit.check_is_root() for unit in units], [True, False, False])
    alone = wrapped(bench, tower(), units=("head",))
    claims.same("a unit that is asked first", alone.head.check_is_root(), True)


def list_units(bench: InterfaceBench) -> None:
    """Note which units are listed, in what order."""
    claims = Claims(bench)
    engine = bench.names.FullyShardedDataParallel
    root = wrapped(bench, tower())
    units = [root, root.middle, root.middle[1]]
    claims.same("all units", _where(units, engine.fsdp_modules(root)), [0, 1, 2])
    claims.same("the units of a unit", _where(units, engine.fsdp_modules(root.middle)), [1, 2])
    claims.same("the root alone", _where(units, engine.fsdp_modules(root, root_only=True)), [0])
    claims.same("their class", {type(unit) for unit in engine.fsdp_modules(root)}, {engine})


def list_units_of_others(bench: InterfaceBench) -> None:
    """Note which units are listed of a module that is not wrapped itself."""
    claims = Claims(bench)
    engine = bench.names.FullyShardedDataParallel
    first, second = wrapped(bench, tower(), units=("middle",)), wrapped(bench, tower(), units=())
    plain = nn.ModuleDict({"first": first, "between": nn.Linear(2, 2), "second": second})
    units = [first, first.middle, second]
    claims.same("all units below", _where(units, engine.fsdp_modules(plain)), [0, 1, 2])
    claims.same("the roots below", _where(units, engine.fsdp_modules(plain, root_only=True)), [0, 2])
    claims.same("units of a model without", engine.fsdp_modules(nn.Linear(2, 2)), [])


def apply_to_all(bench: InterfaceBench) -> None:
    """Double every weight by ``apply``, and note what it saw, what it gave, and what became of the weights."""
    claims = Claims(bench)
    root = wrapped(bench, tower())
    seen: dict[tuple[int, ...], int] = {}

    def double(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            seen[tuple(module.weight.shape)] = seen.get(tuple(module.weight.shape), 0) + 1
            with torch.no_grad():
                module.weight.mul_(2)

    claims.same("what it returns", root.apply(double) is root, True)
    claims.same("shapes that it saw", sorted(seen.items()), [((1, 5), 1), ((3, 5), 1), ((5, 3), 2)])
    doubled = {name: value * (2 if "weight" in name else 1) for name, value in parameters(tower()).items()}
    claims.same("weights afterwards", summoned(bench, root), doubled)
    alone = tower()
    alone.load_state_dict(doubled, strict=False)
    claims.same("an output afterwards", root(batch(bench.rank)).detach(), alone(batch(bench.rank)).detach())


def apply_while_it_runs(bench: InterfaceBench) -> None:
    """Note what becomes of ``apply`` in a forward."""
    claims = Claims(bench)

    class Impatient(Tower):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            claims.refuses("apply in forward", lambda: roots[0].apply(lambda module: None))
            return super().forward(rows)

    roots: list[Any] = []
    roots.append(wrapped(bench, Impatient()))
    roots[0](batch(bench.rank))


@dataclass
class _Pair:
    first: torch.Tensor
    second: torch.Tensor


class _Talkative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = tower()

    # Any: containers of tensors, inside each other.
    def forward(
        self, rows: torch.Tensor, *, scales: dict[str, torch.Tensor], times: int = 1
    ) -> dict[str, Any]:
        hidden = self.tower(rows) * scales["up"] * times
        return {"pair": _Pair(hidden, hidden * 2), "list": [hidden * 3, ("text", hidden - 1)], "none": None}


def _loss_of_all(output: dict[str, Any]) -> torch.Tensor:
    pair, (third, (_, fourth)) = output["pair"], output["list"]
    total: torch.Tensor = (pair.first + pair.second + third + fourth).sum()
    return total


def call_with_keywords(bench: InterfaceBench) -> None:
    """Pass tensors by keyword, take them out of containers, and note what they were and what they taught."""
    claims = Claims(bench)
    root = wrapped(bench, _Talkative(), units=("tower", "tower.middle"))
    rows, scales = batch(bench.rank), {"up": torch.tensor(2.0)}
    output = root(rows, scales=scales, times=3)
    alone = _Talkative()
    whole = alone(rows, scales=scales, times=3)
    claims.same(
        "the containers", [list(output), type(output["pair"]), output["none"]], [list(whole), _Pair, None]
    )
    claims.same("a text in them", output["list"][1][0], "text")
    claims.same("their sum", _loss_of_all(output).detach(), _loss_of_all(whole).detach())
    (_loss_of_all(output) * bench.size).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    for rank in range(bench.size):
        loss = _loss_of_all(alone(batch(rank), scales=scales, times=3))
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    expected = {name: p.grad for name, p in alone.named_parameters()}
    with bench.names.FullyShardedDataParallel.summon_full_params(root, with_grads=True):
        got = {name: p.grad.clone() for name, p in root.named_parameters() if p.grad is not None}
    claims.same("what they taught", got, {k: g for k, g in expected.items() if g is not None})


def name_parameters(bench: InterfaceBench) -> None:
    """Note the names of parameters outside and inside ``summon_full_params``."""
    claims = Claims(bench)
    engine, names = bench.names.FullyShardedDataParallel, list(parameters(tower()))
    root = wrapped(bench, tower())
    outside = [name for name, _ in root.named_parameters()]
    claims.same("names outside", [_plain(name) for name in outside], names)
    claims.same("names outside tell of the wrapper", outside == names, False)
    with engine.summon_full_params(root):
        claims.same("names inside", [name for name, _ in root.named_parameters()], names)
        prefixed = [name for name, _ in root.named_parameters(prefix="model")]
        claims.same("names inside with a prefix", prefixed, [f"model.{name}" for name in names])
        claims.same("names of its own", [n for n, _ in root.named_parameters(recurse=False)], [])
    claims.same("names outside again", [name for name, _ in root.named_parameters()], outside)


def name_flat_parameters(bench: InterfaceBench) -> None:
    """Note what parameters are shown of flat ones outside and inside ``summon_full_params``."""
    claims = Claims(bench)
    engine, names = bench.names.FullyShardedDataParallel, parameters(tower())
    root = wrapped(bench, tower(), use_orig_params=False)
    flat = list(root.parameters())
    claims.same("one for each unit", len(flat), 1 + len(UNITS))
    claims.same("their class", [isinstance(p, bench.names.FlatParameter) for p in flat], [True] * len(flat))
    with engine.summon_full_params(root):
        claims.same("values inside", {n: p.detach().clone() for n, p in root.named_parameters()}, names)
        kinds = {isinstance(p, bench.names.FlatParameter) for p in root.parameters()}
        claims.same("flat ones inside", kinds, {False})
    claims.same("the same ones afterwards", _where(flat, root.parameters()), list(range(len(flat))))


def name_buffers(bench: InterfaceBench) -> None:
    """Note the names of buffers outside and inside ``summon_full_params``."""
    claims = Claims(bench)
    buffers = {name: b.clone() for name, b in tower().named_buffers()}
    root = wrapped(bench, tower())
    claims.same("names outside", [_plain(name) for name, _ in root.named_buffers()], list(buffers))
    with bench.names.FullyShardedDataParallel.summon_full_params(root):
        claims.same("buffers inside", {n: b.clone() for n, b in root.named_buffers()}, buffers)
        prefixed = [name for name, _ in root.named_buffers(prefix="model")]
        claims.same("names inside with a prefix", prefixed, [f"model.{name}" for name in buffers])


class Conversion(Enum):
    """How one asks for doubles."""

    TO = "module.to(torch.float64)"
    DOUBLE = "module.double()"


def convert(bench: InterfaceBench, how: Conversion, form: Form) -> None:
    """Make doubles of the model once wrapped, train a step, and note dtypes and values."""
    _convert(bench, wrapped(bench, tower(), use_orig_params=form.use_orig_params), how)


def convert_after_a_forward(bench: InterfaceBench) -> None:
    """Make doubles of a model that ran already, train a step, and note dtypes and values."""
    root = wrapped(bench, tower())
    root(batch(bench.rank))
    _convert(bench, root, Conversion.TO)


def _convert(bench: InterfaceBench, root: Any, how: Conversion) -> None:
    claims = Claims(bench)
    result = root.double() if how is Conversion.DOUBLE else root.to(torch.float64)
    claims.same("what it returns", result is root, True)
    optimizer = torch.optim.SGD(root.parameters(), lr=0.25)
    output = train(bench, root, dtype=torch.float64)
    claims.same("the output's dtype", output.dtype, torch.float64)
    dtypes = {p.grad.dtype for p in root.parameters() if p.grad is not None}
    claims.same("dtypes of gradients", dtypes - {torch.float64}, set())
    optimizer.step()
    claims.same(
        "parameters afterwards", summoned(bench, root), trained_alone(bench.size, torch.float64, lr=0.25)
    )


def _where(units: list[Any], found: Iterable[Any]) -> list[int]:
    """Tell objects by their place in a list: what is noted must be the same on every rank."""
    return [next((i for i, unit in enumerate(units) if unit is other), -1) for other in found]


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != WRAPPED)
