"""A plan asks for one thing: its mesh, its divisor and its needs follow from it, and what makes no sense is refused."""

from __future__ import annotations

import math

import pytest

from engine.contract import Capability, Layout, Plan, Replicas, UnsupportedError

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
def test_a_factor_by_which_nobody_can_divide_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match=r"divide_factor: expected a positive number, got .*; try None"):
        Plan(divide_factor=factor)


def test_a_factor_is_a_capability_even_where_it_is_the_number_of_ranks() -> None:
    plan = Plan(divide_factor=2)
    assert plan.needs == {Capability.GRADIENT_DIVIDE}
    with pytest.raises(UnsupportedError, match="GRADIENT_DIVIDE"):
        plan.refuse_beyond(frozenset(Capability) - {Capability.GRADIENT_DIVIDE})
