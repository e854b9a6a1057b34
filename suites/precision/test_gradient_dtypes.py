"""Parameters that set a dtype for their gradients: new, waiting, communicated and stored gradients have it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shardproof import EVEN, FOUR_OR_MORE_EVEN, Capability, Op
from shardproof.suites.composable import bench as benches
from shardproof.suites.composable.bench import Bench, whole_gradients
from shardproof.suites.params import param, parametrize

expects = partial(benches.expects, beside=frozenset({Capability.GRADIENT_DTYPES}))
GRADIENTS, ON_THE_WIRE, DTYPES = "gradients", "dtypes on the wire", "dtypes of gradients"
LOW, HIGH = torch.bfloat16, torch.float32
SIZE = 8
ANY = {"first": None, "second": None}
FINE = 257.0  # not representable in bfloat16, nor is the value of odd ranks, nor the mean
MEAN = FINE + 2


class _Exact(torch.autograd.Function):
    """Scales rows by a weight whose gradient has the dtype `Scale.made`, whatever the weight's is."""

    # Any, for both: contexts and gradients have no types in torch.
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, made: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.made = made
        return rows * weight.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        return None, (gradient * rows).to(ctx.made), None


class Scale(nn.Module):
    """Two weights; the gradient of each is its input row, in the requested dtype."""

    def __init__(self, dtype: torch.dtype = LOW) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(SIZE, dtype=dtype))
        self.second = nn.Parameter(torch.ones(SIZE, dtype=dtype))
        self.made = HIGH
        self.used = ("first", "second")

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        """Scale the row by each used weight."""
        scale: Any = _Exact.apply  # torch leaves it untyped
        return torch.stack([scale(row, getattr(self, name), self.made) for name in self.used])


def _prepared(bench: Bench, layout: str = "fully_shard", dtype: torch.dtype = LOW, **given: Any) -> Any:
    """Make a module whose first weight sets float32 for its gradients, or with the options passed by name."""
    model: Any = Scale(dtype)
    dtypes = {"first": HIGH, **given.pop("dtypes", {})}
    for name, wanted in dtypes.items():
        getattr(model, name).grad_dtype = wanted
    apply = bench.api.replicate if layout == "replicate" else bench.api.fully_shard
    mesh = bench.mesh(2) if layout == "hybrid" else bench.mesh()
    apply(model, mesh=mesh, **given)
    return model


def _train(bench: Bench, model: Any, value: float = FINE) -> None:
    """Add ``value`` to each used gradient, on odd ranks 4 more: in the mean 2."""
    row = torch.full((SIZE,), value + 4 * (bench.rank % 2), device=bench.device)
    model(row).sum().backward()


def _filled(**values: tuple[float, torch.dtype]) -> dict[str, torch.Tensor]:
    return {name: torch.full((SIZE,), value, dtype=dtype) for name, (value, dtype) in values.items()}


def _wire(bench: Bench) -> list[str]:
    reductions = {Op.REDUCE_SCATTER, Op.ALL_REDUCE}
    return [e.dtype for e in bench.ledger() if e.op in reductions]


@pytest.mark.rows("T57", "T58", "CV09")
@pytest.mark.kills("ForgetsDtypesOfGradients")
@pytest.mark.worlds(EVEN)
@parametrize("layout", "fully_shard", "replicate", param("hybrid", worlds=FOUR_OR_MORE_EVEN))
@expects(GRADIENTS, DTYPES, ON_THE_WIRE)
def test_come_wait_cross_and_stay_in_the_dtype_set_for_them(bench: Bench, layout: str) -> None:
    """A gradient of a wider dtype than others in its unit is not rounded, and is still reduced with them."""
    model = _prepared(bench, layout)
    for syncs in (False, False, True):
        model.set_requires_gradient_sync(syncs)
        _train(bench, model)
    shown = whole_gradients(model)
    bench.same(GRADIENTS, {"first": shown["first"]}, _filled(first=(3 * MEAN, HIGH)))
    bench.near(GRADIENTS, shown["second"], _filled(second=(3 * MEAN, LOW))["second"], tolerance=0.02)
    bench.same(DTYPES, [g.dtype for g in shown.values()], [HIGH, LOW])
    bench.same(ON_THE_WIRE, _wire(bench), ["float32"] * (2 if layout == "hybrid" else 1))


@pytest.mark.rows("CV10")
@pytest.mark.kills("ForgetsDtypesOfGradients")
@pytest.mark.worlds(EVEN)
@parametrize("stored, made", (LOW, HIGH), (HIGH, LOW), ids=["wider", "narrower"])
@expects(GRADIENTS, ON_THE_WIRE)
def test_stay_as_they_come_where_any_dtype_will_do(
    bench: Bench, stored: torch.dtype, made: torch.dtype
) -> None:
    model = _prepared(bench, dtype=stored, dtypes=ANY)
    model.made = made
    _train(bench, model, 256.0)
    bench.same(GRADIENTS, whole_gradients(model), _filled(first=(258.0, made), second=(258.0, made)))
    bench.same(ON_THE_WIRE, _wire(bench), [str(made).rpartition(".")[2]])


@pytest.mark.rows("CV11")
@pytest.mark.kills("ForgetsDtypesOfGradients")
@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
@expects(GRADIENTS, ON_THE_WIRE)
def test_sums_of_several_dtypes_across_replicas_are_of_the_widest(bench: Bench) -> None:
    model = _prepared(bench, "hybrid", dtypes=ANY)
    model.set_requires_all_reduce(False)
    _train(bench, model)
    model.set_requires_all_reduce(True)
    model.made = LOW
    _train(bench, model, 256.0)
    bench.same(
        GRADIENTS, whole_gradients(model), _filled(first=(MEAN + 258, HIGH), second=(MEAN + 258, HIGH))
    )
    bench.same(ON_THE_WIRE, _wire(bench), ["float32"] * 3)


@pytest.mark.rows("P01")
@pytest.mark.kills("ForgetsDtypesOfGradients")
@pytest.mark.worlds(EVEN)
@expects(GRADIENTS)
def test_are_added_to_zeros_of_their_dtypes_where_ranks_use_other_parameters(bench: Bench) -> None:
    model = _prepared(bench)
    model.set_reduce_scatter_unused_params(True)
    model.used = ("first",) if bench.rank % 2 else ("second",)
    _train(bench, model)
    # Only odd ranks have the first, in full; the even ones have the second, rounded to 256.
    expected = _filled(first=((FINE + 4) / 2, HIGH), second=(128.0, LOW))
    bench.near(GRADIENTS, whole_gradients(model)["second"], expected.pop("second"), tolerance=0.02)
    bench.same(GRADIENTS, {"first": whole_gradients(model)["first"]}, expected)


@pytest.mark.rows("T60", "P02", "CV12")
@pytest.mark.kills("AddsZerosOfAnyDtype")
@pytest.mark.worlds(EVEN)
@expects("frozen", "thawed", "with a dtype to reduce in")
def test_zeros_without_a_dtype_are_refused_on_every_rank(bench: Bench) -> None:
    """Also on ranks that use the parameter: otherwise they would wait for the others."""
    model = _prepared(bench, dtypes={"first": None})
    model.set_reduce_scatter_unused_params(True)
    model.first.requires_grad_(False)
    model.used = ("second",)
    _train(bench, model, 256.0)
    bench.same("frozen", whole_gradients(model), _filled(second=(258.0, LOW)))
    model.first.requires_grad_(True)
    model.used = ("first", "second") if bench.rank == 0 else ("second",)
    bench.refuses("thawed", lambda: _train(bench, model), ValueError, naming="dtype")
    policy = bench.api.mixed_precision(reduce_dtype=HIGH)
    model = _prepared(bench, dtypes={"first": None}, mp_policy=policy)
    model.set_reduce_scatter_unused_params(True)
    model.used = ("first", "second") if bench.rank == 0 else ("second",)
    _train(bench, model)
    expected = _filled(first=(FINE / bench.size, HIGH))
    bench.same("with a dtype to reduce in", {"first": whole_gradients(model)["first"]}, expected)


@pytest.mark.rows("T57", "CV13")
@pytest.mark.kills("ForgetsDtypesOfGradients")
@pytest.mark.worlds(EVEN)
@expects("after training", "after conversion")
def test_keep_their_dtypes_when_parameters_are_converted_and_loaded(bench: Bench) -> None:
    model = _prepared(bench)
    model.to(torch.float16)
    model.load_state_dict({name: p.detach().clone() for name, p in model.named_parameters()}, assign=True)
    _train(bench, model)
    bench.same("after training", whole_gradients(model)["first"], _filled(first=(MEAN, HIGH))["first"])
    bench.same("after training", whole_gradients(model)["second"].dtype, torch.float16)
    model.to(LOW)
    bench.same("after conversion", {p.dtype for p in model.parameters()}, {LOW})
    bench.same("after conversion", whole_gradients(model)["first"], _filled(first=(MEAN, HIGH))["first"])
