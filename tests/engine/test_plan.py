"""A plan determines its mesh, divisor and capabilities, and refuses options that contradict each other."""

from __future__ import annotations

import math

import pytest
import torch

from shardproof.engine.contract import (
    Accumulation,
    Buffers,
    Capability,
    Grouping,
    Layout,
    Offload,
    Placement,
    Plan,
    Prefetch,
    Replicas,
    Reshard,
    Roots,
    Tuning,
    UnsupportedError,
    Wire,
)

MESHES = {
    Replicas.ONE: {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (1, 4), 8: (1, 8)},
    Replicas.TWO: {2: (2, 1), 4: (2, 2), 6: (2, 3), 8: (2, 4)},
    Replicas.PAIRS: {2: (1, 2), 4: (2, 2), 6: (3, 2), 8: (4, 2)},
    Replicas.SINGLES: {1: (1, 1), 2: (2, 1), 3: (3, 1), 4: (4, 1), 8: (8, 1)},
}
by_mesh = pytest.mark.parametrize(
    ("replicas", "world_size", "sizes"),
    [(replicas, n, sizes) for replicas, of_world in MESHES.items() for n, sizes in of_world.items()],
    ids=lambda x: getattr(x, "name", str(x)),
)


@by_mesh
def test_hybrid_mesh_has_as_many_replicas_as_asked(
    replicas: Replicas, world_size: int, sizes: tuple[int, int]
) -> None:
    axes = Plan(layout=Layout.HYBRID, replicas=replicas).axes(world_size)
    assert [axis.name for axis in axes] == ["replicate", "shard"]
    assert tuple(axis.size for axis in axes) == sizes
    assert math.prod(sizes) == world_size


def test_hybrid_means_two_replicas_unless_asked_otherwise() -> None:
    assert Plan(layout=Layout.HYBRID) == Plan(layout=Layout.HYBRID, replicas=Replicas.TWO)


@pytest.mark.parametrize("world_size", [1, 3, 5])
@pytest.mark.parametrize("replicas", [Replicas.TWO, Replicas.PAIRS], ids=lambda r: r.name)
def test_odd_worlds_have_no_halves(replicas: Replicas, world_size: int) -> None:
    with pytest.raises(ValueError, match=rf"{replicas}.*expected an even world size, got {world_size}; try "):
        Plan(layout=Layout.HYBRID, replicas=replicas).axes(world_size)


@pytest.mark.parametrize("layout", [Layout.NATIVE, Layout.REPLICATE, Layout.SHARD], ids=lambda x: x.name)
def test_only_a_hybrid_layout_has_replicas(layout: Layout) -> None:
    assert [axis.size for axis in Plan(layout=layout).axes(6)] == [6]
    with pytest.raises(ValueError, match=r"expected Layout\.HYBRID beside Replicas\.ONE, got .*; try "):
        Plan(layout=layout, replicas=Replicas.ONE)


def test_divisor_is_the_number_of_ranks_or_the_factor_asked_for() -> None:
    assert Plan().divisor(6) == 6
    assert Plan(divide_factor=4.0).divisor(6) == 4.0


@pytest.mark.parametrize("factor", [0, -2, math.inf, math.nan])
def test_a_factor_that_cannot_divide_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match=r"divide_factor: expected a positive number, got .*; try None"):
        Plan(divide_factor=factor)


def test_a_factor_is_a_capability_even_where_it_is_the_number_of_ranks() -> None:
    plan = Plan(divide_factor=2)
    assert plan.needs == {Capability.GRADIENT_DIVIDE}
    with pytest.raises(UnsupportedError, match="GRADIENT_DIVIDE"):
        plan.refuse_beyond(frozenset(Capability) - {Capability.GRADIENT_DIVIDE})


# Each option, and the capabilities that it needs.
OPTIONS = {
    Capability.REPLICATE: Plan(layout=Layout.REPLICATE),
    Capability.SHARD: Plan(layout=Layout.SHARD),
    Capability.HYBRID: Plan(layout=Layout.HYBRID),
    Capability.SHARD_DIM: Plan(placement=Placement.LARGEST),
    Capability.CPU_OFFLOAD: Plan(offload=Offload.CPU),
    Capability.OPTIMIZER_OFFLOAD: Plan(offload=Offload.OPTIMIZER),
    Capability.SEVERAL_ROOTS: Plan(roots=Roots.EACH_UNIT),
    Capability.TENSOR_PARALLEL: Plan(tensor_parallel=2),
    Capability.PIPELINE: Plan(pipeline_stages=2),
    Capability.UNITS: Plan(grouping=Grouping.REQUIRED),
    Capability.IGNORE: Plan(ignored=("weight",)),
    Capability.RESHARD_POLICY: Plan(reshard=Reshard.KEEP),
    Capability.GATHER_ONCE: Plan(gathered_once=("embedding",)),
    Capability.PREFETCH: Plan(prefetch=Prefetch()),
    Capability.ACCUMULATE: Plan(accumulation=Accumulation.LAST_MICROBATCH),
    Capability.COMPUTE_DTYPE: Plan(compute_dtype=torch.bfloat16),
    Capability.REDUCE_DTYPE: Plan(reduce_dtype=torch.bfloat16),
    Capability.REDUCE_SUM: Plan(wire=Wire.SUM),
    Capability.OVERLAP: Plan(tuning=Tuning.OVERLAPPED),
    Capability.ROUND_ROBIN: Plan(tuning=Tuning.ROUND_ROBIN),
    Capability.BUCKETS: Plan(bucket_bytes=1),
    Capability.REDUCE_BUFFERS: Plan(max_reduce_buffers=1),
    Capability.BUFFERS: Plan(buffers=Buffers.GROUP),
    Capability.CLIP_IN_STEP: Plan(clip_in_step=1.0),
    Capability.FORWARD_METHODS: Plan(forward_methods=(("encoder", "encode"),)),
    Capability.UNIT_STATE: Plan(demands=frozenset({Capability.UNIT_STATE})),
}


@pytest.mark.parametrize("capability", OPTIONS, ids=lambda c: c.name)
def test_each_option_needs_its_capability_and_no_other(capability: Capability) -> None:
    plan = OPTIONS[capability]
    assert plan.needs == {capability}
    with pytest.raises(UnsupportedError, match=capability.name):
        plan.refuse_beyond(frozenset(Capability) - {capability})
    plan.refuse_beyond({capability})


def test_an_option_that_goes_further_needs_more() -> None:
    joint = Plan(units=("norm,head",), grouping=Grouping.REQUIRED)
    assert joint.needs == {Capability.UNITS, Capability.JOINT_UNITS}
    assert Plan(reshard=Reshard.TO_PAIRS).needs == {Capability.RESHARD_POLICY, Capability.RESHARD_PART}
    assert Plan().needs == Plan(units=("norm,head",)).needs == frozenset()


def test_stages_are_the_outermost_axis_and_tensors_the_innermost() -> None:
    plan = Plan(layout=Layout.HYBRID, pipeline_stages=2, tensor_parallel=2)
    axes = plan.axes(16)
    assert [(axis.name, axis.size) for axis in axes] == [
        ("pipe", 2),
        ("replicate", 2),
        ("shard", 2),
        ("tensor", 2),
    ]
    assert plan.data_size(16) == 4
    assert [plan.data_rank(rank, 16) for rank in range(16)] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert plan.data_axes == ("replicate", "shard")


def test_a_world_that_the_model_does_not_divide_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"expected a world size that 2 divides .*, got 3; try --world threads:4"
    ):
        Plan(tensor_parallel=2).axes(3)


def test_reductions_are_in_the_dtype_of_the_computation_unless_asked_otherwise() -> None:
    assert Plan().reduction_dtype is None
    assert Plan(compute_dtype=torch.bfloat16).reduction_dtype is torch.bfloat16
    mixed = Plan(compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert mixed.reduction_dtype is torch.float32


def test_prefetch_by_distance_asks_for_neighbours_in_the_order_of_use() -> None:
    prefetch = Prefetch.by_distance(("a", "b", "c"), forward=2, backward=1)
    assert prefetch.forward == (("a", ("b", "c")), ("b", ("c",)))
    assert prefetch.backward == (("b", ("a",)), ("c", ("b",)))
    assert Prefetch.by_distance(("a", "b"), forward=0, backward=0) == Prefetch()
