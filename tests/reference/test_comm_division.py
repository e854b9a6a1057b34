"""By what gradients are divided: the average, a factor of the user's, in every dtype, layout and way to accumulate."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from harness.worlds.rank import RankContext
from harness.worlds.spec import WorldKind
from tests.reference.front_doors import BY_NAME
from tests.reference.watching import both_doors, doors_with, each, hybrid_mesh, run

SIZE = 4
FACTORS = (None, 2.0, 4.0, 5.0)
# A8: torch 2.13.0 divides twice where the shard axis has one rank. Another version has to be looked at again.
DIVIDES_TWICE = torch.__version__.startswith("2.13.")


class Layout(Enum):
    """How four ranks are laid out, as the number of shards."""

    FLAT = "flat"
    HYBRID = "2x2"
    ONE_SHARD = "4x1"
    ONE_REPLICA = "1x4"
    REPLICAS = "replicate"

    @property
    def num_shards(self) -> int:
        """Count the ranks that share a parameter."""
        return {Layout.HYBRID: 2, Layout.ONE_SHARD: 1, Layout.REPLICAS: 1}.get(self, SIZE)


class Dtypes(Enum):
    """Parameter dtype and reduce dtype."""

    FP32 = ("float32", None)
    REDUCE_BF16 = ("float32", "bfloat16")
    REDUCE_FP16 = ("float32", "float16")
    BF16_REDUCE_FP32 = ("bfloat16", "float32")
    FP64 = ("float64", None)

    @property
    def is_reduced_with_care(self) -> bool:
        """Tell whether division is split around the sum: any reduce dtype but fp32 and bf16."""
        return self in {Dtypes.REDUCE_FP16, Dtypes.FP64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One cell of the table of division rules."""

    layout: Layout
    dtypes: Dtypes
    factor: float | None
    sum_only: bool

    @property
    def id(self) -> str:
        """Spell the cell for a diff."""
        return (
            f"{self.layout.value} {self.dtypes.name} /{self.factor} {'sum' if self.sum_only else ''}".strip()
        )

    @property
    def has_plain_ops(self) -> bool:
        """Tell whether sum and average suffice; else torch asks for PREMUL_SUM, which only NCCL has."""
        if self.factor is None or self.sum_only or self.dtypes.is_reduced_with_care:
            return True
        return self.layout.num_shards in {1, self.factor}

    @property
    def torch_divides_twice(self) -> bool:
        """Tell whether this is a cell of the bug."""
        is_split = self.sum_only or self.dtypes.is_reduced_with_care
        return self.layout.num_shards == 1 and self.factor is not None and is_split


WAYS = [
    Way(layout=layout, dtypes=dtypes, factor=factor, sum_only=sum_only)
    for layout in Layout
    for dtypes in Dtypes
    for factor in FACTORS
    for sum_only in (False, True)
]
TOTAL = float(sum(range(1, SIZE + 1)))  # rank r contributes r + 1 to every element


class Scaled(nn.Module):
    """A weight whose gradient is whatever it is multiplied by."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 2, dtype=dtype))

    def forward(self, amount: float) -> torch.Tensor:
        """Scale the weight."""
        return (self.weight * amount).sum()


def _mesh(layout: Layout) -> DeviceMesh | None:
    shapes = {Layout.HYBRID: (2, 2), Layout.ONE_SHARD: (SIZE, 1), Layout.ONE_REPLICA: (1, SIZE)}
    return hybrid_mesh(*shapes[layout]) if layout in shapes else None


def _sharded(door_name: str, layout: Layout, dtypes: Dtypes, mesh: DeviceMesh | None = None) -> Any:
    door = BY_NAME[door_name]
    param, reduce = dtypes.value
    policy = door.mixed_precision(reduce_dtype=getattr(torch, reduce) if reduce else None)
    model = Scaled(getattr(torch, param))
    if layout is Layout.REPLICAS:
        return door.replicate(model, mp_policy=policy)
    return door.fully_shard(model, mesh=mesh, mp_policy=policy)


def _gradient(model: Any) -> float:
    gradient = model.weight.grad
    assert isinstance(gradient, DTensor)
    assert gradient.dtype == model.weight.dtype
    local = gradient.to_local()
    assert bool((local == local.flatten()[0]).all()), f"expected one value everywhere, got {local}"
    return float(local.flatten()[0])


def _divide(context: RankContext, door: str, way: Way, mesh: DeviceMesh | None = None) -> float:
    model = _sharded(door, way.layout, way.dtypes, mesh)
    if way.factor is not None:
        model.set_gradient_divide_factor(way.factor)
    model.set_force_sum_reduction_for_comms(way.sum_only)
    model(context.rank + 1.0).backward()
    return _gradient(model)


def _divide_each(context: RankContext, door: str, ways: list[Way]) -> dict[Way, float | str]:
    mesh = _mesh(ways[0].layout)
    return each(ways, lambda way: _divide(context, door, way, mesh))


def _right(way: Way) -> float:
    return TOTAL / (way.factor or SIZE)


@both_doors
@pytest.mark.parametrize("layout", Layout, ids=lambda layout: layout.value)
def test_gradients_are_the_sum_over_the_factor(door: str, layout: Layout, tmp_path: Path) -> None:
    is_torch = door == "torch"
    ways = [way for way in WAYS if way.layout is layout]
    if is_torch:
        # The reference divides by itself where the backend cannot premultiply; torch raises there.
        ways = [way for way in ways if way.has_plain_ops and not way.torch_divides_twice]
    for observed in run(tmp_path, SIZE, _divide_each, door, ways):
        expected = {way.id: _right(way) for way in ways}
        assert {way.id: value for way, value in observed.items()} == pytest.approx(expected, rel=1e-6)


@pytest.mark.skipif(not DIVIDES_TWICE, reason="measured with torch 2.13; look again")
@pytest.mark.parametrize("layout", [Layout.ONE_SHARD, Layout.REPLICAS], ids=lambda layout: layout.value)
def test_torch_divides_twice_where_one_rank_has_all(layout: Layout, tmp_path: Path) -> None:
    ways = [way for way in WAYS if way.layout is layout and way.torch_divides_twice]
    assert ways
    for observed in run(tmp_path, SIZE, _divide_each, "torch", ways):
        expected = {way.id: _right(way) / (way.factor or 1.0) for way in ways}
        # 0.4 is no number of fp16 or bf16; the bug is a factor of 2 and more.
        assert {way.id: value for way, value in observed.items()} == pytest.approx(expected, rel=1e-2)


def _divide_alone(context: RankContext, door: str, dtypes: Dtypes, replicated: bool) -> dict[Any, Any]:
    layout = Layout.REPLICAS if replicated else Layout.FLAT
    ways = [w for w in WAYS if w.layout is layout and w.dtypes is dtypes and w.factor in {None, 2.0}]
    return {(w.factor, w.sum_only): _divide(context, door, w) for w in ways}


@both_doors
@pytest.mark.parametrize("replicated", [False, True], ids=["sharded", "replicated"])
@pytest.mark.parametrize("dtypes", [Dtypes.FP32, Dtypes.FP64], ids=lambda dtypes: dtypes.name)
def test_one_rank_divides_once(door: str, dtypes: Dtypes, replicated: bool, tmp_path: Path) -> None:
    (observed,) = run(tmp_path, 1, _divide_alone, door, dtypes, replicated)
    expected = {(factor, only): 1 / (factor or 1.0) for factor in (None, 2.0) for only in (False, True)}
    if door == "torch" and DIVIDES_TWICE:
        expected[2.0, True] = 0.25  # A8 again
        if dtypes is Dtypes.FP64:
            expected[2.0, False] = 0.25
    assert observed == expected


class Pace(Enum):
    """When microbatches are reduced."""

    EACH = "each microbatch"
    LAST = "the last microbatch"
    SCATTER_EACH = "scattered each, all-reduced last"


def _accumulate(context: RankContext, model: Any, pace: Pace) -> float:
    for microbatch in range(3):
        is_last = microbatch == 2
        if pace is Pace.LAST:
            model.set_requires_gradient_sync(is_last)
        if pace is Pace.SCATTER_EACH:
            model.set_requires_all_reduce(is_last)
        model((context.rank + 1.0) * 2**microbatch).backward()
    return _gradient(model)


def _accumulate_each(
    context: RankContext, door: str, layout: Layout, rows: list[tuple[Dtypes, Pace]]
) -> dict[tuple[Dtypes, Pace], float | str]:
    mesh = _mesh(layout)
    return each(rows, lambda row: _accumulate(context, _sharded(door, layout, row[0], mesh), row[1]))


@both_doors
@pytest.mark.parametrize("layout", Layout, ids=lambda layout: layout.value)
def test_microbatches_weigh_the_same(door: str, layout: Layout, tmp_path: Path) -> None:
    rows = [(dtypes, pace) for dtypes in Dtypes for pace in Pace]
    for observed in run(tmp_path, SIZE, _accumulate_each, door, layout, rows):
        assert observed == dict.fromkeys(rows, (1 + 2 + 4) * TOTAL / SIZE)


def _factor_of_one_group(context: RankContext, door: str) -> tuple[float, float]:
    engine = BY_NAME[door]
    inner, outer = Scaled(torch.float32), Scaled(torch.float32)
    outer.add_module("inner", inner)
    engine.fully_shard(inner)
    model = engine.fully_shard(outer)
    model.set_gradient_divide_factor(float(2 * SIZE))
    model.set_force_sum_reduction_for_comms(True)  # CPU has no PREMUL_SUM
    (model(1.0) + inner(1.0)).backward()
    return _gradient(outer), _gradient(inner)


@both_doors
def test_a_factor_is_of_one_group_only(door: str, tmp_path: Path) -> None:
    assert run(tmp_path, SIZE, _factor_of_one_group, door) == [(0.5, 1.0)] * SIZE


@both_doors
def test_a_factor_divides_over_gloo(door: str, tmp_path: Path) -> None:
    way = Way(layout=Layout.FLAT, dtypes=Dtypes.FP32, factor=8.0, sum_only=True)
    observed = run(tmp_path, 2, _divide_each, door, [way], kind=WorldKind.PROCESSES)
    assert [list(of.values()) for of in observed] == [[3 / 8]] * 2


def _old_name(context: RankContext, door: str) -> float:
    model = _sharded(door, Layout.FLAT, Dtypes.FP32)
    with pytest.warns((DeprecationWarning, FutureWarning)):
        model.set_reduce_scatter_divide_factor(2.0)
    model(1.0).backward()
    return _gradient(model)


@doors_with("set_reduce_scatter_divide_factor")
def test_the_old_name_of_the_factor_warns(door: str, tmp_path: Path) -> None:
    assert run(tmp_path, 1, _old_name, door) == [0.5]
