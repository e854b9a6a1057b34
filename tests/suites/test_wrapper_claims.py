"""A wrong claim of a case of the wrapper is noted with the actual value, and never as right."""

from __future__ import annotations

import inspect
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardproof import InterfaceBench, PreparedModel, WrapperNames
from shardproof.engine.adapters.torch_fsdp1 import NAMES
from shardproof.suites.expect import RIGHT
from shardproof.suites.wrapper import test_units
from shardproof.suites.wrapper.expect import Bench, expects

ONE = torch.tensor([1.0, 2.0])


class _Named(PreparedModel):
    def wrapper(self) -> WrapperNames:
        return NAMES


def _noted(claim: Callable[[Bench], None]) -> str:
    notes: list[str] = []
    bench = InterfaceBench(
        prepared=_Named(nn.Identity()),
        rank=0,
        size=1,
        device=torch.device("cpu"),
        note=lambda subject, value: notes.append(f"{subject}: {value}"),
        ledger=tuple,
    )
    claim(Bench(bench))
    (note,) = notes
    return note.removeprefix("it: ")


@pytest.mark.parametrize(
    "value",
    [3, "text", None, ONE, torch.tensor(1), [ONE, {"a": ONE}], {"a": 1.5, "b": (ONE,)}, {1, 2}],
    ids=repr,
)
def test_equal_values_are_right(value: object) -> None:
    assert _noted(lambda bench: bench.same("it", value, value)) == RIGHT


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (1, 2),
        (None, ONE),
        (ONE, None),
        (ONE.double(), ONE),
        (ONE.view(1, 2), ONE),
        (ONE + 1e-6, ONE),
        (torch.tensor([1.0, math.nan]), ONE),
        ([ONE], [ONE, ONE]),
        ((ONE,), [ONE]),
        ({"a": ONE}, {"b": ONE}),
        ({"b": 1, "a": 1}, {"a": 1, "b": 1}),
        ({}, {"a": 1}),
        ({"a": 1}, {}),
    ],
    ids=repr,
)
def test_values_that_differ_are_noted(got: object, expected: object) -> None:
    noted = _noted(lambda bench: bench.same("it", got, expected))
    assert noted != RIGHT
    assert "expected" in noted


FIVE = torch.arange(15.0).view(3, 5)
OTHER = FIVE.index_put((torch.tensor([1, 2]), torch.tensor([3, 0])), torch.tensor([9.0, -1.0]))


@pytest.mark.parametrize(
    ("got", "expected", "noted"),
    [
        (OTHER, FIVE, "is 9.0 at [1, 3], expected 8.0; 2 of 15 elements differ"),
        (
            {"a": [ONE, OTHER]},
            {"a": [ONE, FIVE]},
            "['a'][1] is 9.0 at [1, 3], expected 8.0; 2 of 15 elements differ",
        ),
        (torch.tensor(2.5), torch.tensor(1.5), "is 2.5 at [], expected 1.5; 1 of 1 elements differ"),
        ([1, 2], [1, 1], "[1] is 2, expected 1"),
        ([1], [1, 1], "has 1 items, expected 2: [1] instead of [1, 1]"),
        ({"a": 1}, {"a": 1, "b": 2, "c": 3}, "misses key 'b' and 1 more, expected ['a', 'b', 'c']"),
        ({"a": 1, "b": 2}, {"a": 1}, "has key 'b' and 0 more, expected ['a']"),
        ({"b": 1, "a": 1}, {"a": 1, "b": 1}, "has key 'b' in place 0, expected 'a'"),
        (3, {"a": 1}, "is 3, expected a mapping with keys ['a']"),
        (ONE.double(), ONE, "is torch.float64 [2], expected torch.float32 [2]"),
        (None, ONE, "is of type NoneType, expected a plain tensor"),
    ],
    ids=repr,
)
def test_the_first_element_that_differs_is_named(got: object, expected: object, noted: str) -> None:
    assert _noted(lambda bench: bench.same("it", got, expected)) == noted


def test_near_is_a_share_of_the_largest_of_a_tensor() -> None:
    def near(difference: float) -> str:
        return _noted(lambda bench: bench.near("it", ONE + difference, ONE, tolerance=1e-3))

    assert near(1.9e-3) == RIGHT
    assert near(2.1e-3) != RIGHT
    assert near(math.nan) != RIGHT


def test_near_compares_numbers_that_are_no_floats_exactly() -> None:
    counts = torch.tensor([1000])
    assert _noted(lambda bench: bench.near("it", counts + 1, counts, tolerance=0.5)) != RIGHT


def _raise(error: Exception) -> None:
    raise error


def test_a_claim_of_refusal_needs_a_refusing_error() -> None:
    assert _noted(lambda bench: bench.refuses("it", lambda: _raise(ValueError("no")))) == RIGHT
    assert "KeyError" in _noted(lambda bench: bench.refuses("it", lambda: _raise(KeyError("lost"))))
    assert "accepted" in _noted(lambda bench: bench.refuses("it", lambda: None))


def test_a_refusal_by_another_error_than_promised_is_none() -> None:
    noted = _noted(lambda bench: bench.refuses("it", lambda: _raise(ValueError("no")), RuntimeError))
    assert noted == "ValueError: no"


def test_a_body_is_made_a_test_that_takes_a_trial() -> None:
    @expects("it")
    def test(bench: Bench, policy: str, units: list[str]) -> None:
        """Claim something."""

    assert list(inspect.signature(test).parameters) == ["trial", "policy", "units"]
    assert test.__doc__ == "Claim something."


def test_a_rank_finds_the_body_of_a_test_by_its_name() -> None:
    case = test_units.test_makes_a_unit_of_every_module
    body = inspect.unwrap(case)
    assert body is not case
    assert pickle.loads(pickle.dumps(body)) is body
