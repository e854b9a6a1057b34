"""The wrapper as a module: attribute access, apply, calls with arguments, and conversions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
import torch
from torch import nn

from shardproof.suites.params import parametrize
from shardproof.suites.wrapper.expect import Bench, expects
from shardproof.suites.tower import LR, Tower, batch, parameters, shown_gradients
from shardproof.suites.wrapper.wrapping import EACH_FORM, Form
from shardproof.suites.tower import tower, trained_alone

CONVERTED = ("what it returns", "the output's dtype", "dtypes of gradients", "parameters afterwards")


@pytest.mark.api("module")
@pytest.mark.kills("WrapsItsModuleAgain")
@expects("the module of the root", "the module of a unit")
def test_shows_the_module_that_it_wraps(bench: Bench) -> None:
    model = tower()
    middle = model.middle
    root = bench.wrapped(model)
    bench.same("the module of the root", root.module is model, True)
    bench.same("the module of a unit", root.middle.module is middle, True)


@pytest.mark.api("__getattr__")
@pytest.mark.kills("HidesAttributes")
@expects("a submodule", "a plain attribute", "a method", "a buffer", "a missing attribute")
def test_passes_on_attributes(bench: Bench) -> None:
    model = tower()
    stem = model.stem
    root = bench.wrapped(model)
    bench.same("a submodule", root.stem is stem, True)
    bench.same("a plain attribute", getattr(root, "kind", None), "tower")
    describe = getattr(root, "describe", str)
    bench.same("a method", describe("of rank"), "tower of rank")
    bench.same("a buffer", root.offset, torch.tensor([3.0]))
    bench.refuses("a missing attribute", lambda: root.nothing, AttributeError)


@pytest.mark.api("__getitem__")
@pytest.mark.kills("CountsItemsFromOne")
@expects("an item", "a slice")
def test_passes_on_items(bench: Bench) -> None:
    layers = [nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)]
    chain = bench.wrapped(nn.Sequential(*layers), units=("2",))
    items = [chain[0] is layers[0], chain[1] is layers[1], chain[-1].module is layers[2]]
    bench.same("an item", items, [True] * 3)
    bench.same("a slice", [type(module) for module in chain[:2]], [nn.Linear, nn.ReLU])


@pytest.mark.api("apply")
@pytest.mark.kills("AppliesToShards", "ForgetsWhatWasApplied")
@expects("what it returns", "shapes that it saw", "weights afterwards", "an output afterwards")
def test_applies_to_whole_parameters_and_keeps_what_it_did(bench: Bench) -> None:
    root = bench.wrapped(tower())
    seen: list[tuple[int, ...]] = []

    def double(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            seen.append(tuple(module.weight.shape))
            with torch.no_grad():
                module.weight.mul_(2)

    bench.same("what it returns", root.apply(double) is root, True)
    bench.same("shapes that it saw", sorted(seen), [(1, 5), (3, 5), (5, 3), (5, 3)])
    doubled = {name: value * (2 if "weight" in name else 1) for name, value in parameters(tower()).items()}
    bench.same("weights afterwards", bench.summoned(root), doubled)
    alone = tower()
    alone.load_state_dict(doubled, strict=False)
    bench.same("an output afterwards", root(batch(bench.rank)).detach(), alone(batch(bench.rank)).detach())


@pytest.mark.api("apply")
@pytest.mark.kills("AppliesInSilence")
@expects("apply in forward")
def test_refuses_to_apply_in_forward(bench: Bench) -> None:
    class Impatient(Tower):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            bench.refuses("apply in forward", lambda: roots[0].apply(lambda module: None))
            return super().forward(rows)

    roots: list[Any] = []
    roots.append(bench.wrapped(Impatient()))
    roots[0](batch(bench.rank))


@dataclass
class _Pair:
    first: torch.Tensor
    second: torch.Tensor


class _Talkative(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = tower()

    # Any: nested containers of tensors.
    def forward(
        self, rows: torch.Tensor, *, scales: dict[str, torch.Tensor], times: int = 1
    ) -> dict[str, Any]:
        hidden = self.tower(rows) * scales["up"] * times
        return {"pair": _Pair(hidden, hidden * 2), "list": [hidden * 3, ("text", hidden - 1)], "none": None}


def _sum(output: dict[str, Any]) -> Any:
    pair, (third, (_, fourth)) = output["pair"], output["list"]
    return (pair.first + pair.second + third + fourth).sum()


@pytest.mark.api("forward")
@pytest.mark.kills("DropsKeywords")
@expects("the containers", "a text in them", "sum of the outputs", "gradients")
def test_passes_keywords_and_containers_through_forward(bench: Bench) -> None:
    root, alone = bench.wrapped(_Talkative(), units=("tower", "tower.middle")), _Talkative()
    keywords: dict[str, Any] = {"scales": {"up": torch.tensor(2.0)}, "times": 3}
    output, expected = root(batch(bench.rank), **keywords), alone(batch(bench.rank), **keywords)
    containers = [list(output), type(output["pair"]), output["none"]]
    bench.same("the containers", containers, [list(expected), _Pair, None])
    bench.same("a text in them", output["list"][1][0], "text")
    bench.same("sum of the outputs", _sum(output).detach(), _sum(expected).detach())
    (_sum(output) * bench.size).backward()
    for rank in bench.ranks:
        _sum(alone(batch(rank), **keywords)).backward()
    with bench.api.summon_full_params(root, with_grads=True):
        got = shown_gradients(root)
    bench.same("gradients", got, shown_gradients(alone))


class Conversion(Enum):
    """The ways to convert to doubles."""

    TO = "module.to(torch.float64)"
    DOUBLE = "module.double()"


@EACH_FORM
@pytest.mark.api("to")
@pytest.mark.kills("CastsInputsInsteadOfItself")
@parametrize("how", *Conversion)
@expects(*CONVERTED)
def test_trains_in_the_dtype_that_it_was_converted_to(bench: Bench, how: Conversion, form: Form) -> None:
    _convert(bench, bench.wrapped(tower(), use_orig_params=form.use_orig_params), how)


@pytest.mark.api("to")
@pytest.mark.kills("CastsInputsInsteadOfItself")
@expects(*CONVERTED)
def test_can_be_converted_after_a_forward_too(bench: Bench) -> None:
    root = bench.wrapped(tower())
    root(batch(bench.rank))
    _convert(bench, root, Conversion.TO)


def _convert(bench: Bench, root: Any, how: Conversion) -> None:
    result = root.double() if how is Conversion.DOUBLE else root.to(torch.float64)
    bench.same("what it returns", result is root, True)
    optimizer = torch.optim.SGD(root.parameters(), lr=LR)
    output = bench.train(root, dtype=torch.float64)
    bench.same("the output's dtype", output.dtype, torch.float64)
    dtypes = {p.grad.dtype for p in root.parameters() if p.grad is not None}
    bench.same("dtypes of gradients", dtypes - {torch.float64}, set())
    optimizer.step()
    bench.same("parameters afterwards", bench.summoned(root), trained_alone(bench.ranks, torch.float64))
