"""What each collective carries: bytes, dtype, group and reduce op, against closed forms."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.tracing.ledger import Entry, Ledger, Op, Phase
from harness.worlds.rank import RankContext
from tests.reference.front_doors import BY_NAME
from tests.reference.watching import (
    ROOT,
    Watch,
    both_doors,
    each,
    hybrid_mesh,
    padded_numel,
    replicate_chain,
    run,
    shapes_of,
    shard_chain,
)

NUM_UNITS = 2
UNITS = (ROOT, *range(NUM_UNITS))
AG, RS, AR = Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A world, and what a mesh makes of it."""

    size: int
    mesh: tuple[int, int] | None = None
    replicated: bool = False
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def num_shards(self) -> int:
        """Count the ranks that share a parameter."""
        if self.replicated:
            return 1
        return self.mesh[1] if self.mesh else self.size

    def groups(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Give the ranks that hold this rank's other shards, and those that hold the same."""
        if self.replicated:
            return (), tuple(range(self.size))
        if self.mesh is None:
            return tuple(range(self.size)), ()
        replicas, shards = self.mesh
        row, column = divmod(rank, shards)
        return tuple(row * shards + c for c in range(shards)), tuple(
            r * shards + column for r in range(replicas)
        )


Precision = tuple[str | None, str | None]  # param_dtype and reduce_dtype


def _train(context: RankContext, door_name: str, layout: Layout, precision: Precision) -> Ledger:
    door = BY_NAME[door_name]
    param, reduce = (getattr(torch, name) if name else None for name in precision)
    policy = door.mixed_precision(param_dtype=param, reduce_dtype=reduce)
    watch = Watch(context, NUM_UNITS)
    if layout.replicated:
        replicate_chain(door, watch.chain, mp_policy=policy)
    else:
        mesh = hybrid_mesh(*layout.mesh) if layout.mesh else None
        shard_chain(door, watch.chain, mesh=mesh, mp_policy=policy, **layout.options)
    watch.train()
    return tuple(e for e in watch.seen().entries if e.phase is not Phase.PREPARE)


def _train_each(
    context: RankContext, door: str, layout: Layout, precisions: list[Precision]
) -> dict[Precision, Ledger | str]:
    return each(precisions, lambda precision: _train(context, door, layout, precision))


def _bytes(layout: Layout, dtype: str, divided_by: int = 1) -> list[int]:
    itemsize = getattr(torch, dtype).itemsize
    return sorted(itemsize * padded_numel(shapes_of(u), layout.num_shards) // divided_by for u in UNITS)


def _carried(entries: Ledger, op: Op) -> set[tuple[object, ...]]:
    return {(e.dtype, e.group, e.reduce_op) for e in entries if e.op is op}


FLAT = (Layout(size=2), Layout(size=3), Layout(size=4))
PRECISIONS: list[Precision] = [
    (None, None),
    ("bfloat16", None),
    ("bfloat16", "float32"),
    ("float16", "float32"),
    (None, "bfloat16"),
    (None, "float16"),
]


def _expected_op(dtype: str) -> str:
    return "avg" if dtype in {"float32", "bfloat16"} else "sum"


@both_doors
@pytest.mark.parametrize("layout", FLAT, ids=lambda layout: f"flat{layout.size}")
def test_shards_travel_padded_in_their_dtypes(door: str, layout: Layout, tmp_path: Path) -> None:
    for rank, observed in enumerate(run(tmp_path, layout.size, _train_each, door, layout, PRECISIONS)):
        group, _ = layout.groups(rank)
        for (param, reduce), entries in observed.items():
            assert not isinstance(entries, str), entries
            gathered, reduced = param or "float32", reduce or param or "float32"
            assert _carried(entries, AG) == {(gathered, group, None)}
            assert _carried(entries, RS) == {(reduced, group, _expected_op(reduced))}
            forward = [e.num_bytes for e in entries if e.op is AG and e.phase is Phase.FORWARD]
            assert sorted(forward) == _bytes(layout, gathered)
            assert sorted(e.num_bytes for e in entries if e.op is RS) == _bytes(layout, reduced)


@both_doors
@pytest.mark.parametrize("mesh", [(2, 2), (2, 3)], ids=str)
def test_hybrid_shards_travel_in_rows_and_gradients_in_columns(
    door: str, mesh: tuple[int, int], tmp_path: Path
) -> None:
    layout = Layout(size=mesh[0] * mesh[1], mesh=mesh)
    precisions = PRECISIONS[:3]
    for rank, observed in enumerate(run(tmp_path, layout.size, _train_each, door, layout, precisions)):
        row, column = layout.groups(rank)
        for (param, reduce), entries in observed.items():
            assert not isinstance(entries, str), entries
            gathered, reduced = param or "float32", reduce or param or "float32"
            assert _carried(entries, AG) == {(gathered, row, None)}
            assert _carried(entries, RS) == {(reduced, row, "avg")}
            assert _carried(entries, AR) == {(reduced, column, "avg")}
            assert sorted(e.num_bytes for e in entries if e.op is RS) == _bytes(layout, reduced)
            # Only the shard crosses between replicas.
            assert sorted(e.num_bytes for e in entries if e.op is AR) == _bytes(layout, reduced, mesh[1])


@both_doors
def test_replicas_travel_whole(door: str, tmp_path: Path) -> None:
    layout = Layout(size=3, replicated=True)
    for observed in run(tmp_path, layout.size, _train_each, door, layout, PRECISIONS):
        for (param, reduce), entries in observed.items():
            assert not isinstance(entries, str), entries
            reduced = reduce or param or "float32"
            assert {e.op for e in entries} == {AR}
            assert _carried(entries, AR) == {(reduced, (0, 1, 2), _expected_op(reduced))}
            assert sorted(e.num_bytes for e in entries) == _bytes(layout, reduced)


@both_doors
def test_a_number_gathers_from_fewer_ranks_in_backward(door: str, tmp_path: Path) -> None:
    layout = Layout(size=4, options={"reshard_after_forward": 2})
    for rank, observed in enumerate(run(tmp_path, 4, _train_each, door, layout, PRECISIONS[:2])):
        near = (0, 1) if rank < 2 else (2, 3)
        for (param, _), entries in observed.items():
            assert not isinstance(entries, str), entries
            groups = {phase: _groups(entries, phase) for phase in (Phase.FORWARD, Phase.BACKWARD)}
            assert groups == {Phase.FORWARD: {(0, 1, 2, 3)}, Phase.BACKWARD: {near}}
            for phase in groups:
                gathers = [e.num_bytes for e in entries if e.op is AG and e.phase is phase]
                assert sorted(gathers) == _bytes(layout, param or "float32")


def _groups(entries: Ledger, phase: Phase) -> set[tuple[int, ...]]:
    return {e.group for e in entries if e.op is AG and e.phase is phase}


def _with_forced_sum(context: RankContext, door_name: str, hybrid: bool) -> Ledger:
    watch = Watch(context, NUM_UNITS)
    model = shard_chain(BY_NAME[door_name], watch.chain, mesh=hybrid_mesh(2, 2) if hybrid else None)
    for module in (model, *watch.chain.units):
        module.set_force_sum_reduction_for_comms(True)
    watch.train()
    return tuple(e for e in watch.seen().entries if e.op in {RS, AR} and e.phase is Phase.BACKWARD)


@both_doors
@pytest.mark.parametrize("hybrid", [False, True], ids=["flat", "hybrid"])
def test_only_sums_travel_where_sums_are_forced(door: str, hybrid: bool, tmp_path: Path) -> None:
    for entries in run(tmp_path, 4, _with_forced_sum, door, hybrid):
        assert {(e.op, e.reduce_op) for e in entries} == {(RS, "sum"), *([(AR, "sum")] if hybrid else [])}


def _every_result(context: RankContext, door: str) -> tuple[list[Entry], ...]:
    watch = Watch(context, NUM_UNITS)
    shard_chain(BY_NAME[door], watch.chain, mesh=hybrid_mesh(2, 2))
    watch.train()
    entries = [e for e in watch.seen().entries if e.phase is not Phase.PREPARE]
    return ([e for e in entries if e.wait is None], [e for e in entries if e.thread != "main"])


@both_doors
def test_every_result_is_waited_for(door: str, tmp_path: Path) -> None:
    for forgotten, elsewhere in run(tmp_path, 4, _every_result, door):
        assert forgotten == []
        assert elsewhere == [] or all(e.phase is Phase.BACKWARD for e in elsewhere)
