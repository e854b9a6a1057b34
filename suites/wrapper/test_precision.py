"""mixed_precision and ShardedGradScaler: dtypes of computation, of reductions and of shards; steps that overflow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision

from shardproof import SEVERAL
from shardproof.suites.params import param, parametrize
from shardproof.suites.wrapper.expect import Bench, expects
from shardproof.suites.tower import batch, tower

LOW, HIGH = torch.bfloat16, torch.float32
_WIDTH = 64  # wide enough that each rank has a piece
_PRECISE = 0.01  # the means are numbers of 256 and more, whose neighbours in bfloat16 are 2 away


class _Witness(nn.Module):
    """Records the dtypes of its input, weight and buffer, and computes whatever they are."""

    offset: torch.Tensor

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_WIDTH))
        self.register_buffer("offset", torch.zeros(_WIDTH))
        self.inner = inner
        self.seen: list[torch.dtype] = []

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen = [rows.dtype, self.weight.dtype, self.offset.dtype]
        output = rows.to(self.weight.dtype) * self.weight + self.offset.to(self.weight.dtype)
        # The unit inside receives full precision, unless the wrapper casts its input.
        return output if self.inner is None else self.inner(output.float())


class _Inner(_Witness):
    """The part that becomes a unit."""


def _case(name: str, precision: MixedPrecision, *expected: object, kills: tuple[str, ...]) -> Any:
    return param(precision, *expected, id=name, kills=kills)


precise = pytest.mark.api("mixed_precision", "MixedPrecision")
UNASKED, IGNORES = ("ComputesInBfloat16Unasked",), ("IgnoresMixedPrecision",)
FLAGS = ("IgnoresCastFlags", "IgnoresMixedPrecision")


# Dtypes of input, weight and buffer.
@precise
@parametrize(
    "precision, root, unit, output",
    _case("nothing", MixedPrecision(), [HIGH, HIGH, HIGH], [HIGH, HIGH, HIGH], HIGH, kills=UNASKED),
    _case(
        "parameters",
        MixedPrecision(param_dtype=LOW),
        [LOW, LOW, HIGH],
        [HIGH, LOW, HIGH],  # by default inputs of units are unchanged
        LOW,
        kills=IGNORES,
    ),
    _case(
        "no-inputs",
        MixedPrecision(param_dtype=LOW, cast_root_forward_inputs=False),
        [HIGH, LOW, HIGH],
        [HIGH, LOW, HIGH],
        LOW,
        kills=FLAGS,
    ),
    _case(
        "all-inputs",
        MixedPrecision(param_dtype=LOW, cast_forward_inputs=True),
        [LOW, LOW, HIGH],
        [LOW, LOW, HIGH],
        LOW,
        kills=FLAGS,
    ),
    _case(
        "buffers", MixedPrecision(buffer_dtype=LOW), [HIGH, HIGH, LOW], [HIGH, HIGH, LOW], HIGH, kills=IGNORES
    ),
    _case(
        "reductions",
        MixedPrecision(reduce_dtype=LOW),
        [HIGH, HIGH, HIGH],
        [HIGH, HIGH, HIGH],
        HIGH,
        kills=("ComputesInTheReduceDtype",),
    ),
)
@expects("what the root saw", "what the unit saw", "the dtype of the output")
def test_computes_in_the_dtypes_named(
    bench: Bench,
    precision: MixedPrecision,
    root: list[torch.dtype],
    unit: list[torch.dtype],
    output: torch.dtype,
) -> None:
    inner = _Inner()
    model = _Witness(inner)
    policy = bench.names.ModuleWrapPolicy({_Inner})
    result = bench.wrap(model, mixed_precision=precision, auto_wrap_policy=policy)(_ones(bench, 2))
    result.float().sum().backward()
    bench.same("what the root saw", model.seen, root)
    bench.same("what the unit saw", inner.seen, unit)
    bench.same("the dtype of the output", result.dtype, output)


@precise
@parametrize(
    "precision, dtype",
    _case("full", MixedPrecision(param_dtype=LOW), HIGH, kills=("KeepsLowGradients", "RoundsTheShards")),
    _case(
        "low",
        MixedPrecision(param_dtype=LOW, keep_low_precision_grads=True),
        LOW,
        kills=("IgnoresMixedPrecision", "RoundsTheShards"),
    ),
    _case("reduced-low", MixedPrecision(reduce_dtype=LOW), HIGH, kills=("RoundsTheShards",)),
)
@expects("the dtype of gradients", "the dtype of shards", "an update in full precision")
def test_keeps_shards_in_full_precision(bench: Bench, precision: MixedPrecision, dtype: torch.dtype) -> None:
    root = bench.wrap(_Witness(), mixed_precision=precision)
    optimizer = torch.optim.SGD(root.parameters(), lr=2.0**-10)
    root(_ones(bench, 2)).float().sum().backward()
    (weight,) = root.parameters()
    bench.same("the dtype of gradients", None if weight.grad is None else weight.grad.dtype, dtype)
    bench.same("the dtype of shards", weight.dtype, HIGH)
    if weight.grad is not None:
        # Low-precision gradients need an optimizer that accepts them; this one does not.
        weight.grad = weight.grad.to(weight.dtype)
    optimizer.step()
    # bfloat16 cannot represent 1 - 2 / 1024: a master weight that was ever rounded to it shows.
    bench.same("an update in full precision", bool((weight == 1 - 2.0**-9).all()), True)


@precise
@pytest.mark.worlds(SEVERAL)  # a lone rank averages nothing
@parametrize(
    "precision, is_precise",
    _case("nothing", MixedPrecision(), True, kills=UNASKED),
    _case("low", MixedPrecision(reduce_dtype=LOW), False, kills=IGNORES),
    _case("as-computed", MixedPrecision(param_dtype=LOW), False, kills=IGNORES),
    _case(
        "high", MixedPrecision(param_dtype=LOW, reduce_dtype=HIGH), True, kills=("ReducesInTheComputeDtype",)
    ),
)
@expects("whether the mean is precise", "the number of gradients")
def test_reduces_in_the_dtype_named(bench: Bench, precision: MixedPrecision, is_precise: bool) -> None:
    """Average gradients that bfloat16 represents to a mean that it does not."""
    root = bench.wrap(_Witness(), mixed_precision=precision)
    of_ranks = [256.0 + 2 * (rank % 2) for rank in bench.ranks]
    root(_ones(bench, 1) * of_ranks[bench.rank]).float().sum().backward()
    mean = sum(of_ranks) / bench.size
    grads = [p.grad.float() for p in root.parameters() if p.grad is not None and p.numel()]
    are_precise = [bool(((gradient - mean).abs() < _PRECISE).all()) for gradient in grads]
    bench.same("whether the mean is precise", all(are_precise), is_precise)
    bench.same("the number of gradients", len(grads), 1)


def _ones(bench: Bench, num_rows: int) -> torch.Tensor:
    return torch.ones(num_rows, _WIDTH, device=bench.device)


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.norm(self.layer(rows))
        return output


@precise
@pytest.mark.kills("CastsBatchNorm")
@pytest.mark.api("auto_wrap_policy")
@expects(
    "the dtype of the layer", "the dtype of the norm", "the dtype of its input", "the dtypes of statistics"
)
def test_batch_norm_computes_in_full_precision(bench: Bench) -> None:
    model = _Normed()
    norm, layer = model.norm, model.layer
    low = MixedPrecision(param_dtype=LOW)
    root = bench.wrap(model, mixed_precision=low, auto_wrap_policy=bench.names.ModuleWrapPolicy({nn.Linear}))
    layer.register_forward_pre_hook(lambda *_: bench.same("the dtype of the layer", layer.weight.dtype, LOW))
    norm.register_forward_pre_hook(lambda *_: bench.same("the dtype of the norm", norm.weight.dtype, HIGH))
    norm.register_forward_hook(
        lambda module, inputs, output: bench.same("the dtype of its input", inputs[0].dtype, HIGH)
    )
    output = root(torch.arange(12.0, device=bench.device).reshape(3, 4))
    output.float().sum().backward()
    statistics = {buffer.dtype for buffer in norm.buffers() if buffer.is_floating_point()}
    bench.same("the dtypes of statistics", statistics, {HIGH})


@pytest.mark.kills("KeepsOverflowLocal")
@pytest.mark.worlds(SEVERAL)  # a lone rank is all ranks
@pytest.mark.api("ShardedGradScaler")
@parametrize("is_last", False, True, ids=["first", "last"])
@expects("a step with an infinite gradient", "a step with finite gradients")
def test_an_infinite_gradient_on_one_rank_stops_all(bench: Bench, is_last: bool) -> None:
    """Make the gradients of one rank infinite, the first or the last, and then take an honest step."""
    root = bench.wrap(tower())
    optimizer = torch.optim.SGD(root.parameters(), lr=2.0**-6)
    scaler = bench.names.ShardedGradScaler(bench.device.type, init_scale=8.0, growth_interval=1)
    before = [p.detach().clone() for p in root.parameters()]
    for moment, is_infinite, scale in (
        ("a step with an infinite gradient", True, 4.0),
        ("a step with finite gradients", False, 8.0),
    ):
        scaler.scale(root(batch(bench.rank)).sum()).backward()
        if is_infinite and bench.rank == (bench.size - 1 if is_last else 0):
            for gradient in (p.grad for p in root.parameters() if p.grad is not None):
                gradient.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = any(not torch.equal(p, q) for p, q in zip(root.parameters(), before, strict=True))
        bench.same(moment, [moved, scaler.get_scale()], [not is_infinite, scale])
