"""Exercises of ``no_sync``: what is communicated inside and afterwards, and what gradients add up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.fsdp import ShardingStrategy

from shardproof import InterfaceBench, Op
from suites.wrapper.claims import Claims
from suites.wrapper.specimens import UNITS, Form, batch, summoned, tower, train, trained_alone, wrapped

__all__ = [
    "accumulate",
    "count_gathers",
    "count_kept_gathers",
    "count_reductions",
    "leave_by_an_exception",
    "nest",
    "refuse_for_a_unit",
]

_REDUCTIONS = (Op.ALL_REDUCE, Op.REDUCE_SCATTER)
_NUM_UNITS = 1 + len(UNITS)  # the root is one
SILENT = "n"  # of a pattern of steps, the letter of one inside no_sync


def accumulate(bench: InterfaceBench, pattern: str, strategy: ShardingStrategy, form: Form) -> None:
    """Take a step for each letter, those of ``n`` inside no_sync; note what gradients added up to by an update."""
    root = wrapped(bench, tower(), sharding_strategy=strategy, use_orig_params=form.use_orig_params)
    optimizer = torch.optim.SGD(root.parameters(), lr=0.25)
    for step, letter in enumerate(pattern):
        with root.no_sync() if letter == SILENT else nullcontext():
            train(bench, root, step)
    optimizer.step()
    expected = trained_alone(bench.size, lr=0.25, steps=tuple(range(len(pattern))))
    Claims(bench).same("parameters afterwards", summoned(bench, root), expected)


def count_reductions(bench: InterfaceBench, strategy: ShardingStrategy) -> None:
    """Note how often gradients are reduced in steps inside no_sync and outside."""
    claims = Claims(bench)
    root = wrapped(bench, tower(), sharding_strategy=strategy)

    def step() -> None:
        train(bench, root)

    with root.no_sync():
        claims.same("reductions inside", _count(bench, _REDUCTIONS, step), 0)
        claims.same("reductions inside", _count(bench, _REDUCTIONS, step), 0)
    claims.same("reductions afterwards", _count(bench, _REDUCTIONS, step), _NUM_UNITS)
    with root.no_sync():
        claims.same("reductions inside again", _count(bench, _REDUCTIONS, step), 0)


def count_gathers(bench: InterfaceBench) -> None:
    """Note that the gathers of a step are as many whatever the steps before it were."""
    claims = Claims(bench)
    root = wrapped(bench, tower(), sharding_strategy=ShardingStrategy.FULL_SHARD)
    optimizer = torch.optim.SGD(root.parameters(), lr=0.25)
    counts = []
    for letter in "ssnssnns":
        with root.no_sync() if letter == SILENT else nullcontext():
            counts.append(_count(bench, (Op.ALL_GATHER,), lambda: train(bench, root)))
        if letter != SILENT:
            optimizer.step()
            optimizer.zero_grad()
    claims.same("a step that gathers every unit", counts[1] >= _NUM_UNITS, True)
    claims.same("gathers of each step", counts, [counts[1]] * len(counts))


def count_kept_gathers(bench: InterfaceBench) -> None:
    """Note that what is not freed after forward is kept from one backward inside no_sync to the next forward."""
    root = wrapped(bench, tower(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    counts = []
    for letter in "snnss":
        with root.no_sync() if letter == SILENT else nullcontext():
            counts.append(_count(bench, (Op.ALL_GATHER,), lambda: train(bench, root)))
    expected = [_NUM_UNITS, _NUM_UNITS, 0, 0, _NUM_UNITS]
    Claims(bench).same("gathers of each step", counts, expected)


def nest(bench: InterfaceBench) -> None:
    """Enter no_sync inside no_sync; note that the outer one still holds once the inner one ended."""
    claims = Claims(bench)
    root = wrapped(bench, tower())
    with root.no_sync():
        with root.no_sync():
            claims.same("reductions inside both", _count(bench, _REDUCTIONS, lambda: train(bench, root)), 0)
        claims.same("reductions inside one", _count(bench, _REDUCTIONS, lambda: train(bench, root)), 0)
    claims.same("reductions afterwards", _count(bench, _REDUCTIONS, lambda: train(bench, root)), _NUM_UNITS)


def leave_by_an_exception(bench: InterfaceBench) -> None:
    """Leave no_sync by an exception; note that the next step is synchronised."""
    claims = Claims(bench)
    root = wrapped(bench, tower())

    def leave() -> None:
        with root.no_sync():
            raise KeyError("of the caller")

    claims.refuses("the exception", leave, KeyError)
    claims.same("reductions afterwards", _count(bench, _REDUCTIONS, lambda: train(bench, root)), _NUM_UNITS)


def refuse_for_a_unit(bench: InterfaceBench) -> None:
    """Note what becomes of no_sync of a unit inside the root."""
    claims = Claims(bench)
    root = wrapped(bench, tower())
    root(batch(bench.rank))

    def enter() -> None:
        with root.middle.no_sync():
            pass

    claims.refuses("no_sync of a unit", enter, RuntimeError)


# Any: whatever the call gives.
def _count(bench: InterfaceBench, ops: tuple[Op, ...], call: Callable[[], Any]) -> int:
    """Count the collectives of floats that a call issues; integers are an engine's own bookkeeping."""
    already = len(bench.ledger())
    call()
    found = Counter(e.op for e in bench.ledger()[already:] if "float" in e.dtype)
    return sum(found[op] for op in ops)
