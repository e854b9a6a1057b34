"""Results of DTensor operators are propagated once for all ranks, and once for each kind of arguments."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from shardproof.harness.torch_compat.dtensor import own_placement, own_shape, shared_propagation
from shardproof.harness.worlds.rank import RankContext
from tests.shell import python
from tests.values import returned

METHOD = "_propagate_tensor_meta_non_cached"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace torch's propagation by a function that notes its arguments and returns them."""
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
    with shared_propagation():
        assert _ask(2, (3, 4)) == _ask(2, (3, 4)) == [2, (3, 4)]
    assert len(calls) == 1


def test_numbers_of_different_types_are_different_questions(calls: list[Any]) -> None:
    with shared_propagation():
        for one in (1, 1.0, True):
            assert type(_ask(one)[0]) is type(one)
    assert len(calls) == 3


def test_another_operator_or_default_dtype_is_another_question(calls: list[Any]) -> None:
    before = torch.get_default_dtype()
    with shared_propagation():
        _ask(1)
        _ask(1, op="mul")
        try:
            torch.set_default_dtype(torch.float64)
            _ask(1)
        finally:
            torch.set_default_dtype(before)
    assert len(calls) == 3


def test_arguments_that_cannot_be_compared_are_asked_each_time(calls: list[Any]) -> None:
    with shared_propagation():
        _ask(object())
        _ask(object())
    assert len(calls) == 2


def test_a_rank_cannot_spoil_the_answer_of_another(calls: list[Any]) -> None:
    with shared_propagation():
        _ask(1).append("mine")
        assert _ask(1) == [1]


def _tensors() -> Iterator[torch.Tensor]:
    yield from (torch.empty(3, 4), torch.empty(()), torch.empty(0, 2), torch.empty(1, 5, 1))
    yield from (torch.empty(3, 4).t(), torch.empty(4, 6)[:, ::2], torch.empty(2, 3, dtype=torch.bfloat16))


# Operators with known rules, and their numbers of tensors.
KNOWN = {
    "detach.default": 1,
    "clone.default": 1,
    "zero_.default": 1,
    "add_.Tensor": 2,
    "mul_.Tensor": 2,
    "copy_.default": 2,
    "div_.Tensor": 2,
    "sub_.Tensor": 2,
    "lerp_.Scalar": 2,
    "addcmul_.default": 3,
    "addcdiv_.default": 3,
}


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def _schema(name: str, *specs: DTensorSpec) -> OpSchema:
    scalars = (0.5,) if name == "lerp_.Scalar" else ()
    return OpSchema(_overload(name), (*specs, *scalars), {"alpha": -0.1} if name == "add_.Tensor" else {})


@pytest.mark.parametrize("name", KNOWN)
def test_shapes_known_by_rule_are_those_that_torch_computes(name: str) -> None:
    mesh: Any = SimpleNamespace(ndim=1)
    found = 0
    for tensor in _tensors():
        meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
        spec = DTensorSpec(mesh, (Replicate(),), tensor_meta=meta)
        schema = _schema(name, *[spec] * KNOWN[name])
        known = own_shape(schema)
        own = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        scalars = [a for a in schema.args_schema if isinstance(a, float)]
        result = schema.op(*[own] * KNOWN[name], *scalars)
        if known is not None:
            found += 1
            assert known == TensorMeta(result.shape, result.stride(), result.dtype)
    assert found >= 5


def placed(context: RankContext) -> list[str]:
    """Compare placements known by rule with those of torch, and list the differences; a rank body."""
    wholes, pairs = [(Shard(0),), (Shard(1),), (Replicate(),)], [Replicate(), Shard(0), Shard(1), Partial()]
    pair = init_device_mesh("cpu", (2, 2)), [(a, b) for a in pairs for b in pairs]
    whole = init_device_mesh("cpu", (4,)), [*wholes, (Partial(),)]
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    wrong, num_known = [], 0
    for mesh, placements in (whole, pair):
        for first, other, shape, name in product(placements, placements, ((8, 4), (5, 3), (1, 0)), KNOWN):
            meta = TensorMeta(torch.Size(shape), torch.empty(shape).stride(), torch.float32)
            specs = [DTensorSpec(mesh, p, tensor_meta=meta) for p in (first, other, other)[: KNOWN[name]]]
            known = own_placement(schema := _schema(name, *specs))
            if known is None:
                continue
            num_known += 1
            torchs = propagator.propagate_op_sharding_non_cached(schema)
            if known != torchs:
                wrong.append(f"{name} {specs}: {known} instead of {torchs}")
    return wrong or [f"{num_known} known"]


def test_where_results_lie_by_rule_is_where_torch_puts_them(tmp_path: Path) -> None:
    results = returned("processes:4", placed, folder=tmp_path)
    # 11 operators, 3 shapes; of one mesh 3 placements that are not sums, of the other 9; one tensor meets 4 or 16
    # others, whose values the rule ignores; more tensors meet only equal ones.
    assert results == [[f"{3 * (3 * (3 * 4 + 8) + 9 * (3 * 16 + 8))} known"]] * 4


def test_shapes_that_might_be_broadcast_have_no_rule() -> None:
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
    with shared_propagation():
        assert getattr(ShardingPropagator, METHOD) is not before
    assert getattr(ShardingPropagator, METHOD) is before


class _Mesh(SimpleNamespace):
    """Stands in for a rank's mesh; meshes of ranks differ in their owner."""

    def __init__(self, shape: tuple[int, ...] = (2,)) -> None:
        super().__init__(_flatten_rank_map=(0, 1), _layout=shape, device_type="cpu", mesh_dim_names=None)
        self.ndim = len(shape)


def _propagated(monkeypatch: pytest.MonkeyPatch, *, is_moved: bool = False) -> list[Any]:
    """Replace torch's propagation by a function that places results as the first argument."""
    asked: list[Any] = []

    def propagate(_: Any, schema: Any) -> OutputSharding:
        asked.append(schema)
        spec = schema.args_schema[0]
        return OutputSharding(spec, schema if is_moved else None, needs_redistribute=is_moved)

    monkeypatch.setattr(ShardingPropagator, "propagate_op_sharding_non_cached", propagate)
    return asked


def _place(*meshes: Any, op: str = "add", placement: Placement | None = None) -> Any:
    meta = TensorMeta(torch.Size([4]), (1,), torch.float32)
    specs = tuple(DTensorSpec(mesh, (placement or Replicate(),), tensor_meta=meta) for mesh in meshes)
    propagator: Any = ShardingPropagator
    schema = SimpleNamespace(op=op, args_schema=specs, kwargs_schema={})
    return propagator.propagate_op_sharding_non_cached(None, schema)


def test_placements_are_worked_out_once_and_lie_on_each_rank_s_own_mesh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = _propagated(monkeypatch)
    meshes: list[Any] = [_Mesh(), _Mesh(), _Mesh()]
    with shared_propagation():
        results = [_place(mesh, placement=Shard(0)) for mesh in meshes]
    assert len(asked) == 1
    assert all(result.output_spec.mesh is mesh for result, mesh in zip(results, meshes, strict=True))
    assert all(result.output_spec.placements == (Shard(0),) for result in results)


def test_other_placements_operators_and_meshes_are_other_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _propagated(monkeypatch)
    with shared_propagation():
        _place(_Mesh())
        _place(_Mesh(), placement=Shard(0))
        _place(_Mesh(), op="mul")
        _place(_Mesh((1, 2)))
    assert len(asked) == 4


def test_results_that_depend_on_the_place_of_a_rank_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _propagated(monkeypatch, is_moved=True)
    with shared_propagation():
        _place(_Mesh())
        _place(_Mesh())
    assert len(asked) == 2


def test_arguments_on_two_meshes_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _propagated(monkeypatch)
    with shared_propagation():
        _place(_Mesh(), _Mesh())
        _place(_Mesh(), _Mesh())
    assert len(asked) == 2


def computed(context: RankContext) -> list[object]:
    """Compute on tensors cut evenly and not, on two meshes of one world; a rank body."""
    axes = ("replica", "shard")
    meshes = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes), init_device_mesh("cpu", (4,))
    found: list[object] = []
    for mesh in meshes:
        for rows in (8, 5):
            cut = (Replicate(), Shard(0))[-mesh.ndim :]
            whole = torch.arange(rows * 4.0).reshape(rows, 4)
            tensor = distribute_tensor(whole, mesh, cut)
            weight = distribute_tensor(torch.ones(4, 3), mesh, (Replicate(),) * mesh.ndim)
            results = (
                tensor + 1,
                tensor.mul_(0.5),
                tensor @ weight,
                tensor.sum(),
                tensor.sum(0),
                tensor.t(),
                tensor.reshape(rows, 2, 2),
                torch.ops.aten.new_zeros(tensor, [rows, 4]),
                *torch._foreach_add([tensor, tensor], 2.0),
                *tensor.split(3, dim=1),
            )
            for result in results:
                assert isinstance(result, DTensor)
                assert result.device_mesh is mesh
                local = result.to_local()
                found.append(
                    (repr(result.placements), result.shape, local.tolist(), result.full_tensor().tolist())
                )
    return found


def test_ranks_in_threads_compute_the_results_of_processes(tmp_path: Path) -> None:
    threads, processes = (returned(f"{k}:4", computed, folder=tmp_path / k) for k in ("threads", "processes"))
    assert threads == processes


def test_a_rank_may_enter_the_fake_mode_after_another_has_ended() -> None:
    code = """
import threading
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from shardproof.harness.worlds.threads.isolation import isolate_threads

def enter():
    with FakeTensorMode():
        torch.stack([torch.zeros(())])

with isolate_threads():
    for _ in range(8):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
"""
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
