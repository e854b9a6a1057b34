"""How many collectives an accumulating step costs: which modules wait for the last microbatch, and what they keep."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from harness.tracing.ledger import Op
from harness.worlds.rank import RankContext
from tests.reference.front_doors import BY_NAME
from tests.reference.watching import (
    Seen,
    Watch,
    both_doors,
    count,
    each,
    hybrid_mesh,
    replicate_chain,
    run,
    shard_chain,
)

NUM_UNITS = 3  # L
NUM_MICROBATCHES = 3  # m
NUM_WAITING = 2  # d, of the units that wait in SOME_UNITS
NUM_STEPS = 2

Counts = dict[Op, int]


class Waits(Enum):
    """Which modules reduce their gradients on the last microbatch only."""

    ALL = "all"
    ROOT_ONLY = "root only"
    SOME_UNITS = "some units"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation:
    """One way to accumulate. ``kept``: parameters stay gathered until the last backward."""

    reshard: bool | int | None = True
    waits: Waits = Waits.ALL
    kept: bool = False
    hybrid: bool = False
    scatters: bool = False  # only the all-reduce waits; needs hybrid

    @property
    def id(self) -> str:
        """Spell the way for pytest."""
        flags = [name for name in ("kept", "hybrid", "scatters") if getattr(self, name)]
        return "-".join([str(self.reshard), self.waits.name.lower(), *flags])

    @property
    def num_reductions(self) -> int:
        """Count reductions of a step: every group once, and again per early microbatch where it does not wait."""
        early = {
            Waits.ALL: 0,
            Waits.SOME_UNITS: NUM_UNITS - NUM_WAITING + 1,
            Waits.ROOT_ONLY: NUM_UNITS,
        }
        return NUM_UNITS + 1 + early[self.waits] * (NUM_MICROBATCHES - 1)

    @property
    def num_gathers(self) -> int:
        """Count gathers of a step of sharded parameters."""
        num_groups = NUM_UNITS + 1
        if self.reshard is not False:
            return 2 * num_groups * NUM_MICROBATCHES
        if not self.kept:
            return num_groups * NUM_MICROBATCHES
        early = NUM_UNITS if self.waits is Waits.ROOT_ONLY else 0
        return num_groups + early * (NUM_MICROBATCHES - 1)

    def expected(self) -> Counts:
        """Give the counts of a step."""
        reductions = self.num_reductions
        scatters = (NUM_UNITS + 1) * NUM_MICROBATCHES if self.scatters else reductions
        counts = {Op.ALL_GATHER: self.num_gathers, Op.REDUCE_SCATTER: scatters}
        return {**counts, Op.ALL_REDUCE: reductions} if self.hybrid else counts


WAYS = [
    Accumulation(reshard=reshard, waits=waits, kept=kept, hybrid=hybrid, scatters=scatters)
    for hybrid in (False, True)
    for scatters in ((False, True) if hybrid else (False,))
    for reshard in (True, False, 2)
    for waits in Waits
    for kept in (False, True)
    if not kept or (reshard is False and waits is not Waits.SOME_UNITS)
]


def _prepare(watch: Watch, way: Accumulation, is_last: bool) -> None:
    model: object = watch.chain
    targets = list(watch.chain.units)[:NUM_WAITING] if way.waits is Waits.SOME_UNITS else [model]
    options = {} if way.waits is Waits.ALL else {"recurse": False}
    for target in targets:
        setter = "set_requires_all_reduce" if way.scatters else "set_requires_gradient_sync"
        getattr(target, setter)(is_last, **options)
        if way.kept:
            getattr(target, "set_reshard_after_backward")(is_last, **options)  # noqa: B009 - not nn.Module's


def _accumulate(context: RankContext, door: str, way: Accumulation, replicated: bool = False) -> list[Counts]:
    watch = Watch(context, NUM_UNITS)
    if replicated:
        replicate_chain(BY_NAME[door], watch.chain)
    else:
        mesh = hybrid_mesh(2, 2) if way.hybrid else None
        shard_chain(BY_NAME[door], watch.chain, mesh=mesh, reshard_after_forward=way.reshard)
    for step in range(NUM_STEPS):
        for microbatch in range(NUM_MICROBATCHES):
            _prepare(watch, way, microbatch == NUM_MICROBATCHES - 1)
            watch.train(step=step, microbatch=microbatch)
    seen = watch.seen()
    assert not seen.left_whole, f"left whole: {seen.left_whole}"
    return [count(e for e in seen.entries if e.step == step) for step in range(NUM_STEPS)]


def _accumulate_each(
    context: RankContext, door: str, ways: list[Accumulation], replicated: bool
) -> dict[Accumulation, Any]:
    return each(ways, lambda way: _accumulate(context, door, way, replicated))


def _by_id(of: dict[Accumulation, Any]) -> dict[str, Any]:
    return {way.id: value for way, value in of.items()}


@both_doors
@pytest.mark.parametrize("reshard", [True, False, 2])
@pytest.mark.parametrize("hybrid", [False, True], ids=["flat", "hybrid"])
def test_counts_of_an_accumulating_step(door: str, hybrid: bool, reshard: bool | int, tmp_path: Path) -> None:
    ways = [way for way in WAYS if way.hybrid is hybrid and way.reshard is reshard]
    expected = {way: [way.expected()] * NUM_STEPS for way in ways}
    for observed in run(tmp_path, 4, _accumulate_each, door, ways, False):
        assert _by_id(observed) == _by_id(expected)


@both_doors
def test_counts_of_an_accumulating_step_of_replicas(door: str, tmp_path: Path) -> None:
    ways = [Accumulation(waits=waits) for waits in Waits]
    expected = {way: [{Op.ALL_REDUCE: way.num_reductions}] * NUM_STEPS for way in ways}
    for observed in run(tmp_path, 4, _accumulate_each, door, ways, True):
        assert _by_id(observed) == _by_id(expected)


def _never_last(context: RankContext, door: str, hybrid: bool) -> Seen:
    watch = Watch(context, NUM_UNITS)
    mesh = hybrid_mesh(2, 2) if hybrid else None
    model = shard_chain(BY_NAME[door], watch.chain, mesh=mesh)
    for microbatch in range(NUM_MICROBATCHES):
        is_last = microbatch == NUM_MICROBATCHES - 1
        model.set_requires_gradient_sync(is_last)
        model.set_is_last_backward(is_last)
        watch.train(microbatch=microbatch)
    return watch.seen()


@both_doors
@pytest.mark.parametrize("hybrid", [False, True], ids=["flat", "hybrid"])
def test_telling_the_last_backward_changes_no_count(door: str, hybrid: bool, tmp_path: Path) -> None:
    way = Accumulation(reshard=None, hybrid=hybrid)
    # The root keeps its parameters from forward to backward: one gather less per microbatch.
    gathers = way.num_gathers - NUM_MICROBATCHES
    for seen in run(tmp_path, 4, _never_last, door, hybrid):
        assert count(seen.entries) == {**way.expected(), Op.ALL_GATHER: gathers}
        assert not seen.left_whole
