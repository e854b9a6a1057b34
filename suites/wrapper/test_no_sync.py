"""What ``no_sync`` does beside holding back, which trainings that accumulate show: gathers, nesting, errors."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import ShardingStrategy

from shardproof import SEVERAL, Op
from shardproof.suites.wrapper.expect import Bench, expects
from shardproof.suites.tower import LR, UNITS, batch, tower

pytestmark = pytest.mark.api("no_sync")
FULL, KEEP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
SILENT = "n"  # in a pattern of steps, the letter of one inside no_sync; s is one outside
_NUM_UNITS = 1 + len(UNITS)  # the root is one


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("KeepsTheRootInNoSync")
@expects("a step that gathers every unit", "gathers of each step")
def test_gathers_as_often_whatever_came_before(bench: Bench) -> None:
    root = bench.wrapped(tower(), sharding_strategy=FULL)
    optimizer = torch.optim.SGD(root.parameters(), lr=LR)
    counts = []
    for letter in "ssnssnns":
        with root.no_sync() if letter == SILENT else nullcontext():
            counts.append(_gathers(bench, root))
        if letter != SILENT:
            optimizer.step()
            optimizer.zero_grad()
    bench.same("a step that gathers every unit", counts[1] >= _NUM_UNITS, True)
    bench.same("gathers of each step", counts, [counts[1]] * len(counts))


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("FreesInNoSync")
@expects("gathers of each step")
def test_keeps_inside_what_is_not_freed_after_forward(bench: Bench) -> None:
    """Parameters that are not freed after forward stay from one backward inside no_sync to the next forward."""
    root = bench.wrapped(tower(), sharding_strategy=KEEP)
    counts = []
    for letter in "snnss":
        with root.no_sync() if letter == SILENT else nullcontext():
            counts.append(_gathers(bench, root))
    bench.same("gathers of each step", counts, [_NUM_UNITS, _NUM_UNITS, 0, 0, _NUM_UNITS])


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("EndsAllNoSyncsAtOnce")
@expects("reductions inside both", "reductions inside one", "reductions afterwards")
def test_holds_until_the_outermost_ends(bench: Bench) -> None:
    root = bench.wrapped(tower())
    with root.no_sync():
        with root.no_sync():
            bench.same("reductions inside both", _reductions(bench, root), 0)
        bench.same("reductions inside one", _reductions(bench, root), 0)
    bench.same("reductions afterwards", _reductions(bench, root), _NUM_UNITS)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("StaysSilentAfterAnException")
@expects("the exception", "reductions afterwards")
def test_synchronises_again_after_an_exception(bench: Bench) -> None:
    root = bench.wrapped(tower())

    def leave() -> None:
        with root.no_sync():
            raise KeyError("of the caller")

    bench.refuses("the exception", leave, KeyError)
    bench.same("reductions afterwards", _reductions(bench, root), _NUM_UNITS)


@pytest.mark.kills("SilencesUnitsAlone")
@expects("no_sync of a unit")
def test_is_refused_to_a_unit(bench: Bench) -> None:
    root = bench.wrapped(tower())
    root(batch(bench.rank))

    def enter() -> None:
        with root.middle.no_sync():
            pass

    bench.refuses("no_sync of a unit", enter, RuntimeError)


# Any: engines have no common base class.
def _reductions(bench: Bench, root: Any) -> int:
    return _count(bench, root, Op.ALL_REDUCE, Op.REDUCE_SCATTER)


def _gathers(bench: Bench, root: Any) -> int:
    return _count(bench, root, Op.ALL_GATHER)


def _count(bench: Bench, root: Any, *ops: Op) -> int:
    """Count the collectives of floats in a step; integers are an engine's own bookkeeping."""
    already = len(bench.ledger())
    bench.train(root)
    return sum(entry.op in ops and "float" in entry.dtype for entry in bench.ledger()[already:])
