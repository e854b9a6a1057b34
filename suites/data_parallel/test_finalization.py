"""Backwards of DistributedDataParallel that the caller finalizes: gradients are final then, and not before."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from shardproof import SEVERAL, Capability
from shardproof.suites.data_parallel import bench as benches
from shardproof.suites.data_parallel.bench import Bench
from shardproof.suites.tower import LR, batch, copies, gradients, shown_gradients, tower

expects = partial(benches.expects, beside=frozenset({Capability.FINALIZE}))
GRADIENTS, PARAMETERS, REDUCTIONS, REFUSAL = "gradients", "parameters", "reductions", "the refusal"


def _prepared(bench: Bench) -> Any:
    root = bench.wrap(tower())
    root.require_manual_backward_finalization = True
    return root


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("EndsBackwardsUnreduced", "ReducesOnceMoreAtTheEnd")
@pytest.mark.parametrize("num_microbatches", [1, 3], ids=["each", "held"])
@expects(GRADIENTS, REDUCTIONS, PARAMETERS)
def test_each_step_is_reduced_once(bench: Bench, num_microbatches: int) -> None:
    root, alone = _prepared(bench), tower()
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR / 64) for model in (root, alone)]
    counts = []
    for step in range(3):  # buckets are rebuilt after the first
        before = bench.num_reductions()
        *held, last = range(8 * step, 8 * step + num_microbatches)
        with root.no_sync():
            for microbatch in held:
                bench.train(root, step=microbatch)
        bench.train(root, step=last)
        root.finalize_backward()
        counts.append(bench.num_reductions() - before)
        expected = gradients(alone, bench.ranks, (*held, last))
        bench.near(GRADIENTS, shown_gradients(root.module), expected, tolerance=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    bench.same(REDUCTIONS, counts, [1, 1, 1])  # the model is smaller than one bucket
    bench.near(
        PARAMETERS, copies(root.module.named_parameters()), copies(alone.named_parameters()), tolerance=1e-5
    )


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("EndsBackwardsUnreduced")
@expects("when it may be ended", GRADIENTS)
def test_a_hook_may_end_it_once_buckets_are_settled(bench: Bench) -> None:
    root = _prepared(bench)
    rows = batch(bench.rank).to(bench.device).requires_grad_()
    may = []
    for _ in range(3):
        root.zero_grad()
        inputs = rows * 1  # whose gradient comes after those of all parameters
        output = root(inputs)
        may.append(not root.should_finalize_after_backward)
        if may[-1]:
            inputs.register_hook(lambda _: root.finalize_backward())  # type: ignore[no-untyped-call]
        (output.sum() * bench.size).backward()
        if not may[-1]:
            root.finalize_backward()
    bench.same("when it may be ended", may[-1], True)
    bench.same(GRADIENTS, shown_gradients(root.module), gradients(tower(), bench.ranks))


def _ended_twice(bench: Bench) -> None:
    root = _prepared(bench)
    bench.train(root)
    root.finalize_backward()
    root.finalize_backward()


def _ended_unasked(bench: Bench) -> None:
    root = bench.wrap(tower())
    bench.train(root)
    root.finalize_backward()


def _ended_before_backward(bench: Bench) -> None:
    root = _prepared(bench)
    root(batch(bench.rank).to(bench.device))
    root.finalize_backward()


def _ended_while_held(bench: Bench) -> None:
    root = _prepared(bench)
    with root.no_sync():
        bench.train(root)
        root.finalize_backward()


def _never_ended(bench: Bench) -> None:
    root = _prepared(bench)
    for _ in range(2):
        bench.train(root)


def _mode_amid_a_step(bench: Bench) -> None:
    root = _prepared(bench)
    bench.train(root)
    root.require_manual_backward_finalization = False


_REFUSALS: dict[str, Callable[[Bench], None]] = {
    "unasked": _ended_unasked,
    "twice": _ended_twice,
    "before_backward": _ended_before_backward,
    "while_reductions_are_held": _ended_while_held,
    "a_forward_before_the_end": _never_ended,
    "another_mode_amid_a_step": _mode_amid_a_step,
}


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("EndsBackwardsWhateverComes")
@pytest.mark.parametrize("name", _REFUSALS)
@expects(REFUSAL)
def test_refuses(bench: Bench, name: str) -> None:
    bench.refuses(REFUSAL, lambda: _REFUSALS[name](bench), RuntimeError, naming="finaliz|reduction|iteration")
