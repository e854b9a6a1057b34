"""The shapes that a DTensor operator gives are worked out once for all ranks, and once for each kind of arguments."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from harness.torch_versions import own_shape, shared_shape_propagation

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


def _tensors() -> Iterator[torch.Tensor]:
    yield from (torch.empty(3, 4), torch.empty(()), torch.empty(0, 2), torch.empty(1, 5, 1))
    yield from (torch.empty(3, 4).t(), torch.empty(4, 6)[:, ::2], torch.empty(2, 3, dtype=torch.bfloat16))


@pytest.mark.parametrize("op", ["detach", "clone", "zero_", "add_", "mul_", "copy_", "div_", "sub_"])
def test_what_is_known_by_rule_is_what_torch_finds_out(op: str) -> None:
    overload: Any = getattr(torch.ops.aten, op)
    takes_another = op not in {"detach", "clone", "zero_"}
    overload = overload.Tensor if takes_another and op != "copy_" else overload.default
    mesh: Any = SimpleNamespace(ndim=1)
    found = 0
    for tensor in _tensors():
        meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
        spec = DTensorSpec(mesh, (Replicate(),), tensor_meta=meta)
        schema: Any = SimpleNamespace(
            op=overload,
            args_schema=(spec, spec) if takes_another else (spec,),
            kwargs_schema={"alpha": -0.1} if op == "add_" else {},
        )
        known = own_shape(schema)
        own = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        result = overload(*([own, own] if takes_another else [own]))
        if known is not None:
            found += 1
            assert known == TensorMeta(result.shape, result.stride(), result.dtype)
    assert found >= 5


def test_what_might_be_broadcast_is_no_rule() -> None:
    mesh: Any = SimpleNamespace(ndim=1)

    def spec(*shape: int) -> DTensorSpec:
        tensor = torch.empty(shape)
        meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
        return DTensorSpec(mesh, (Replicate(),), tensor_meta=meta)

    adds: Any = torch.ops.aten.add_.Tensor
    schema: Any = SimpleNamespace(op=adds, args_schema=(spec(3), spec(2, 3)), kwargs_schema={})
    assert own_shape(schema) is None
    schema = SimpleNamespace(op=torch.ops.aten.add.Tensor, args_schema=(spec(3), spec(3)), kwargs_schema={})
    assert own_shape(schema) is None


def test_torch_is_as_before_afterwards() -> None:
    before = getattr(ShardingPropagator, METHOD)
    with shared_shape_propagation():
        assert getattr(ShardingPropagator, METHOD) is not before
    assert getattr(ShardingPropagator, METHOD) is before
