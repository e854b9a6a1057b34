"""What counts as a difference between a whole state and what a rank holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardproof.engine.contract import Cut, PreparedModel
from shardproof.harness.training.whole_state import difference_of_state, digests_of


def trained() -> tuple[PreparedModel, dict[str, Any]]:
    """Train ``used`` for one step and return the model with its whole state, which has no state of ``unused``."""
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    prepared = PreparedModel(model)
    prepared.optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    optimizer = prepared.built_optimizer()
    model["used"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    return prepared, {
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizer": {
            "state": {key: dict(of) for key, of in state["state"].items()},
            "param_groups": state["param_groups"],
        },
    }


def momentum_of_unused(value: float) -> tuple[PreparedModel, dict[str, Any]]:
    """Return a model that holds momentum of what was never used, and a whole state without it."""
    prepared, state = trained()
    weight = prepared.module["unused"].weight  # type: ignore[index]
    prepared.built_optimizer().state[weight]["momentum_buffer"] = torch.full((2, 2), value)
    return prepared, state


def difference(prepared: PreparedModel, state: dict[str, Any]) -> str:
    return difference_of_state(prepared, state, state["model"])


def test_a_state_that_is_held_differs_in_nothing() -> None:
    assert difference(*trained()) == ""


def test_zeros_may_be_made_before_the_first_gradient_as_well_as_with_it() -> None:
    assert difference(*momentum_of_unused(0.0)) == ""


def test_other_values_that_the_state_lacks_are_a_difference() -> None:
    assert "optimizer: 'unused.weight/momentum_buffer'" in difference(*momentum_of_unused(0.5))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state["model"]["used.bias"], ["model['used.bias']"]),
        (
            lambda state: state["optimizer"]["state"][0]["momentum_buffer"],
            ["optimizer[0]['momentum_buffer']"],
        ),
        (lambda state: state["model"]["unused.bias"], []),
    ],
    ids=["parameter", "state", "not_asked"],
)
def test_digests_tell_which_tensor_has_other_values(
    change: Callable[[dict[str, Any]], torch.Tensor], words: list[str]
) -> None:
    _, state = trained()
    before = set(digests_of(state, {"used.weight", "used.bias"}).split())
    change(state)[-1] += 1
    after = digests_of(state, {"used.weight", "used.bias"}).split()
    assert [word.partition("=")[0] for word in after if word not in before] == words


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_zeros_are_one_where_the_state_has_something_of_that_parameter(value: float) -> None:
    prepared, state = trained()
    weight = prepared.module["used"].weight  # type: ignore[index]
    prepared.built_optimizer().state[weight]["momentum_buffer"] = torch.full((2, 2), value)
    assert "optimizer: 'used.weight/momentum_buffer'" in difference(prepared, state)


@pytest.mark.parametrize(("cut", "is_right"), [(Cut.PARAMETERS, True), (Cut.EVENLY, False)], ids=str)
def test_a_rank_has_no_state_where_another_owns_each_parameter(
    monkeypatch: pytest.MonkeyPatch, cut: Cut, is_right: bool
) -> None:
    """With more ranks than parameters, a rank of ZeRO-1 owns none, though it holds all of them."""
    prepared, state = trained()
    monkeypatch.setattr(type(prepared), "cut", cut)
    prepared.built_optimizer().state.clear()
    assert difference(prepared, state) == (
        "" if is_right else "optimizer: 'used.weight/momentum_buffer' is not there, nor any other"
    )


@pytest.mark.parametrize(("is_one", "text"), [(False, ""), (True, "are one tensor in memory")])
def test_two_tensors_of_one_memory_are_a_difference(is_one: bool, text: str) -> None:
    prepared, state = trained()
    count = torch.ones(())
    for held in prepared.built_optimizer().state.values():
        held["count"] = torch.ones(())
    for handed_out in state["optimizer"]["state"].values():
        handed_out["count"] = count if is_one else count.clone()
    found = difference(prepared, state)
    assert found.endswith(text) if text else found == ""
