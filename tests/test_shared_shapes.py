"""The shapes that a DTensor operator gives are worked out once for all ranks, and once for each kind of arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from harness.torch_versions import shared_shape_propagation

METHOD = "_propagate_tensor_meta_non_cached"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Put in torch's place what notes the arguments that it is asked for, and gives them back."""
    found: list[Any] = []

    def propagate(_: Any, schema: Any) -> Any:
        found.append(schema.args_schema)
        return [*schema.args_schema]

    monkeypatch.setattr(ShardingPropagator, METHOD, propagate)
    return found


def _ask(*arguments: object, op: str = "add") -> Any:
    schema = SimpleNamespace(op=op, args_schema=arguments, kwargs_schema={})
    propagator: Any = ShardingPropagator
    return getattr(propagator, METHOD)(None, schema)


def test_equal_questions_are_asked_once(calls: list[Any]) -> None:
    with shared_shape_propagation():
        assert _ask(2, (3, 4)) == _ask(2, (3, 4)) == [2, (3, 4)]
    assert len(calls) == 1


def test_numbers_of_different_types_are_different_questions(calls: list[Any]) -> None:
    with shared_shape_propagation():
        for one in (1, 1.0, True):
            assert type(_ask(one)[0]) is type(one)
    assert len(calls) == 3


def test_another_operator_or_default_dtype_is_another_question(calls: list[Any]) -> None:
    before = torch.get_default_dtype()
    with shared_shape_propagation():
        _ask(1)
        _ask(1, op="mul")
        try:
            torch.set_default_dtype(torch.float64)
            _ask(1)
        finally:
            torch.set_default_dtype(before)
    assert len(calls) == 3


def test_what_cannot_be_compared_is_asked_each_time(calls: list[Any]) -> None:
    with shared_shape_propagation():
        _ask(object())
        _ask(object())
    assert len(calls) == 2


def test_nobody_can_spoil_the_answer_of_another(calls: list[Any]) -> None:
    with shared_shape_propagation():
        _ask(1).append("mine")
        assert _ask(1) == [1]


def test_torch_is_as_before_afterwards() -> None:
    before = getattr(ShardingPropagator, METHOD)
    with shared_shape_propagation():
        assert getattr(ShardingPropagator, METHOD) is not before
    assert getattr(ShardingPropagator, METHOD) is before
