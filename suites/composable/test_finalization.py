"""Backwards that the caller finalizes: nothing held back is reduced before, and everything once afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof import EVEN, SEVERAL, Capability
from shardproof.suites.composable import bench as benches
from shardproof.suites.composable.bench import Bench, whole, whole_gradients
from shardproof.suites.params import parametrize
from shardproof.suites.tower import LR, UNITS, batch, fill, gradients, shown_gradients, tower

expects = partial(benches.expects, beside=frozenset({Capability.FINALIZE}))
GRADIENTS, REDUCTIONS, REFUSAL = "gradients", "reductions", "the refusal"
NUM_MICROBATCHES = 3


def _prepared(bench: Bench, layout: str = "fully_shard") -> Any:
    """Make a tower of three units whose backwards the caller finalizes."""
    model: Any = tower()
    mesh = bench.mesh(2) if layout == "hybrid" else bench.mesh()
    apply = bench.api.replicate if layout == "replicate" else bench.api.fully_shard
    for module in (*(model.get_submodule(unit) for unit in reversed(UNITS)), model):
        apply(module, mesh=mesh)
    model.set_manual_backward_finalization(True)
    return model


def _claim_gradients(bench: Bench, model: nn.Module, steps: range) -> None:
    bench.same(GRADIENTS, whole_gradients(model), gradients(tower(), bench.ranks, steps))


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("FinalizesEachBackward", "FinalizesTwice")
@parametrize("layout", "fully_shard", "replicate")
@expects(GRADIENTS, REDUCTIONS, "parameters")
def test_reduces_once_when_asked_to(bench: Bench, layout: str) -> None:
    model, alone = _prepared(bench, layout), tower()
    optimizers = [torch.optim.SGD(m.parameters(), lr=LR / 64) for m in (model, alone)]
    for step in range(2):
        steps = range(step, step + NUM_MICROBATCHES)
        before = bench.num_reductions()
        model.set_requires_gradient_sync(False)
        for microbatch in steps:
            bench.train(model, step=microbatch)
        early = bench.num_reductions() - before
        model.set_requires_gradient_sync(True)
        model.finalize_backward()
        bench.same(REDUCTIONS, (early, bench.num_reductions() - before), (0, 1 + len(UNITS)))
        if step == 0:
            _claim_gradients(bench, model, steps)
        gradients(alone, bench.ranks, steps)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = {name: p.detach() for name, p in alone.named_parameters()}
    bench.near("parameters", whole(model), expected, tolerance=1e-5)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("FinalizesTwice")
@expects("reductions in backward", "reductions afterwards", GRADIENTS)
def test_reduces_at_the_end_what_no_input_shows_to_be_done(bench: Bench) -> None:
    """The root's own inputs need no gradient: backward alone never shows that the root is done."""
    model = _prepared(bench)
    bench.train(model)
    early = bench.num_reductions()
    model.finalize_backward()
    bench.same("reductions in backward", early >= len(UNITS), True)
    bench.same("reductions afterwards", bench.num_reductions(), 1 + len(UNITS))
    _claim_gradients(bench, model, range(1))


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("FinalizesTwice")
@expects("while reductions are off", GRADIENTS, REDUCTIONS)
def test_keeps_what_is_held_back(bench: Bench) -> None:
    model = _prepared(bench)
    model.set_requires_gradient_sync(False)
    bench.train(model)
    model.finalize_backward()
    bench.same("while reductions are off", (bench.num_reductions(), shown_gradients(model)), (0, {}))
    model.set_requires_gradient_sync(True)
    model.finalize_backward()
    bench.same(REDUCTIONS, bench.num_reductions(), 1 + len(UNITS))
    _claim_gradients(bench, model, range(1))


@pytest.mark.kills("FreesWhenFinalized")
@parametrize("frees", True, False, ids=["freed", "kept"])
@expects("whole afterwards")
def test_leaves_gathered_what_is_to_be_kept(bench: Bench, frees: bool) -> None:
    model = _prepared(bench)
    model.set_reshard_after_backward(frees)
    bench.train(model)
    model.finalize_backward()
    shown = {not isinstance(p, DTensor) for p in model.parameters()}
    bench.same("whole afterwards", shown, {not frees})


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("FinalizesTwice")
@expects("a forward before the wait", "a finalization before the wait", GRADIENTS)
def test_a_handle_is_waited_for_before_anything_else(bench: Bench) -> None:
    model = _prepared(bench)
    model.set_requires_gradient_sync(False)
    bench.train(model)
    model.set_requires_gradient_sync(True)
    handle = model.finalize_backward(async_op=True)
    rows = batch(bench.rank).to(bench.device)
    bench.refuses("a forward before the wait", lambda: model(rows), RuntimeError, naming="wait")
    again = model.finalize_backward
    bench.refuses("a finalization before the wait", again, RuntimeError, naming="wait|finaliz")
    for _ in range(2):
        handle.wait()
    _claim_gradients(bench, model, range(1))


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("FinalizesTwice")
@expects(REFUSAL, GRADIENTS)
def test_a_reset_makes_a_handle_void(bench: Bench) -> None:
    model = _prepared(bench)
    bench.train(model, step=1)
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    bench.refuses(REFUSAL, handle.wait, RuntimeError)
    model.zero_grad()
    bench.train(model)
    model.finalize_backward()
    _claim_gradients(bench, model, range(1))


@pytest.mark.rows("T42")
@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("FinalizesTwice")
@expects(REFUSAL, GRADIENTS)
def test_a_reset_repairs_what_an_error_has_interrupted(bench: Bench) -> None:
    """One unit's reduction fails during a finalization, while others are in flight or over."""
    model = _prepared(bench)
    failures = [RuntimeError("as planned")]

    def fail_once(_: torch.Tensor) -> None:
        if failures:
            raise failures.pop()

    model.middle.set_all_reduce_hook(fail_once)
    model.set_requires_gradient_sync(False)
    bench.train(model, step=1)
    model.set_requires_gradient_sync(True)
    bench.refuses(REFUSAL, model.finalize_backward, RuntimeError, naming="planned")
    model.reset_iter_state()
    model.zero_grad()
    bench.train(model)
    model.finalize_backward()
    _claim_gradients(bench, model, range(1))


class _Chunked(nn.Module):
    """A trunk, whose caller runs the head separately on parts of the trunk's output."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.norm, self.head = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 1)
        fill(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Compute all but the head."""
        made: torch.Tensor = self.norm(self.trunk(rows))
        return made


@pytest.mark.rows("T46")
@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("FinalizesTwice", "FinalizesEachBackward")
@parametrize("units", ("norm,head",), ("norm", "head"), ids=["grouped", "apart"])
@expects(GRADIENTS, REDUCTIONS)
def test_chunks_of_a_loss_add_up(bench: Bench, units: tuple[str, ...]) -> None:
    model: Any = _Chunked()
    for unit in units:
        modules = [model.get_submodule(name) for name in unit.split(",")]
        bench.api.fully_shard(modules if len(modules) > 1 else modules[0], mesh=bench.mesh())
    bench.api.fully_shard(model, mesh=bench.mesh())
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    for step in range(2):
        made = model(batch(bench.rank, step).to(bench.device))
        leaf = made.detach().requires_grad_()
        for chunk in leaf.chunk(2):
            (model.head(chunk).sum() * bench.size).backward()
        made.backward(leaf.grad)
    early = bench.num_reductions()
    model.set_requires_gradient_sync(True)
    model.finalize_backward()
    bench.same(REDUCTIONS, (early, bench.num_reductions()), (0, 1 + len(units)))
    alone = _Chunked()
    for rank in bench.ranks:
        for step in range(2):
            alone.head(alone(batch(rank, step))).sum().backward()
    bench.same(GRADIENTS, whole_gradients(model), shown_gradients(alone))


@pytest.mark.rows("T54")
@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("FinalizesTwice", "SharesNoContext")
@expects("a forward", "a finalization", "a reset", GRADIENTS)
def test_roots_that_share_streams_wait_for_each_other(bench: Bench) -> None:
    one, other = _prepared(bench), _prepared(bench)
    bench.api.share_comm_ctx([one, other])
    for model in (one, other):
        bench.train(model, step=1)
        model.finalize_backward()
        model.zero_grad()
    bench.train(one)
    handle = one.finalize_backward(async_op=True)
    bench.refuses("a forward", lambda: other(batch(bench.rank).to(bench.device)), RuntimeError)
    bench.refuses("a finalization", other.finalize_backward, RuntimeError)
    bench.refuses("a reset", other.reset_iter_state, RuntimeError)
    handle.wait()
    bench.train(other)
    other.finalize_backward()
    for model in (one, other):
        _claim_gradients(bench, model, range(1))


def _amid_an_iteration(bench: Bench) -> object:
    model = _prepared(bench)
    model.set_requires_gradient_sync(False)
    bench.train(model)
    model.set_manual_backward_finalization(True)  # as it is
    return model.set_manual_backward_finalization(False)


def _inside(bench: Bench, method: str, *given: object) -> object:
    model = _prepared(bench)
    model.set_requires_gradient_sync(False)
    bench.train(model)
    return getattr(model.middle, method)(*given)


def _inside_at_first(bench: Bench) -> object:
    model = bench.shard(tower())
    model.middle.set_manual_backward_finalization(True)
    return model(batch(bench.rank).to(bench.device))


def _unasked(bench: Bench) -> object:
    model = bench.shard(tower())
    bench.train(model)
    return model.finalize_backward()


def _by_halves(bench: Bench, layout: str) -> object:
    model = _prepared(bench, layout)
    model.set_requires_gradient_sync(False)
    bench.train(model)
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(False)
    return model.finalize_backward()


_REFUSALS: dict[str, tuple[Callable[[Bench], object], str]] = {
    "the_mode_amid_an_iteration": (_amid_an_iteration, "iteration|backward|finaliz"),
    "the_mode_of_a_unit": (lambda b: _inside(b, "set_manual_backward_finalization", False), "root"),
    "a_unit": (lambda b: _inside(b, "finalize_backward"), "root"),
    "the_mode_of_a_unit_at_first": (_inside_at_first, "root"),
    "unasked": (_unasked, "set_manual_backward_finalization"),
    "replicas_by_halves": (lambda b: _by_halves(b, "hybrid"), "all.reduce"),
    "replicate_by_halves": (lambda b: _by_halves(b, "replicate"), "replicate"),
}


@pytest.mark.worlds(EVEN)
@pytest.mark.kills("FinalizesWhateverComes")
@parametrize("name", *_REFUSALS)
@expects(REFUSAL)
def test_refuses(bench: Bench, name: str) -> None:
    provoke, words = _REFUSALS[name]
    bench.refuses(REFUSAL, lambda: provoke(bench), RuntimeError, naming=words)


@pytest.mark.kills("FinalizesWhateverComes")
@expects("before the first forward", "its handle")
def test_does_nothing_before_there_is_anything_to_do(bench: Bench) -> None:
    model = _prepared(bench)
    bench.same("before the first forward", model.finalize_backward(), None)
    handle = model.finalize_backward(async_op=True)
    bench.same("its handle", hasattr(handle, "wait") and handle.wait(), None)
