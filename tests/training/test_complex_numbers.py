"""Casts, the oracle, comparisons and reports keep the imaginary parts of complex numbers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from shardproof import Capability, Layout, MatchesOracle, Plan, Schedule, Training
from shardproof.fixtures.complex_numbers import ROTARY, SPECTRAL
from shardproof.fixtures.optimizers import ADAMW, SGD, AdamW, Sgd
from shardproof.harness.laws.tolerance import allowed_error
from shardproof.harness.oracle.absolute_error import deviation, largest
from shardproof.harness.oracle.oracle import run_oracle
from shardproof.harness.oracle.oracle_observation import Quantity, TensorKey
from shardproof.harness.torch_compat.dtypes import cast, cast_module, is_rounded, widened
from shardproof.harness.verdicts.vacuity import vacuous_because
from tests.simulated_engine import Honest, Moment, evidence_of

TRAINING = Training(
    problem=SPECTRAL,
    optimizer=SGD,
    plan=Plan(demands=frozenset({Capability.COMPLEX})),
    schedule=Schedule(steps=2),
)
Judged = tuple[bool, str]


@pytest.mark.parametrize(
    ("dtype", "wider", "as_float64"),
    [
        (torch.float32, torch.float64, torch.float64),
        (torch.complex64, torch.float64, torch.complex128),
        (torch.complex128, torch.float32, torch.complex64),
        (torch.int64, torch.float64, torch.int64),
        (torch.bool, torch.float32, torch.bool),
    ],
    ids=str,
)
def test_casts_keep_the_kind_of_numbers(
    dtype: torch.dtype, wider: torch.dtype, as_float64: torch.dtype
) -> None:
    assert cast(torch.ones(2, dtype=dtype), wider).dtype is as_float64
    assert widened(torch.ones(2, dtype=dtype)).dtype is (
        torch.complex128 if dtype.is_complex else torch.float64
    )
    assert is_rounded(dtype) is (dtype not in {torch.int64, torch.bool})


def test_a_module_is_cast_in_place_with_its_imaginary_parts() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.tensor([1 + 2j]))
    module.register_buffer("turns", torch.tensor([3 - 4j]))
    module.register_buffer("count", torch.tensor([5]))
    weight = module.weight
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cast_module(module, torch.float64) is module
    assert module.weight is weight
    assert weight.dtype is torch.complex128
    assert weight.tolist() == [1 + 2j]
    assert module.get_buffer("turns").tolist() == [3 - 4j]
    assert module.get_buffer("count").dtype is torch.int64


def test_complex_numbers_are_as_far_apart_as_they_lie() -> None:
    got, expected = torch.tensor([3 + 4j, 1j, complex(math.nan, 0)]), torch.tensor([0j, 1j, 0j])
    assert deviation(got, expected).tolist() == [5, 0, math.inf]
    assert largest(torch.tensor([3 + 4j, complex(math.inf, 0)])) == 5


def judged(change: Callable[[torch.Tensor], torch.Tensor]) -> Judged:
    """Judge an engine whose last rank reduces the complex gradient to another one in step 1."""

    class Engine(Honest):
        def gradient(self, pieces: torch.Tensor, moment: Moment) -> torch.Tensor | None:
            gradient = super().gradient(pieces, moment)
            assert gradient is not None
            is_asked = moment.name == "turns" and moment.step == 1 and moment.rank == 2
            return change(gradient) if is_asked else gradient

    evidence = evidence_of(TRAINING, 3, Engine(), Layout.REPLICATE)
    assert vacuous_because(evidence) is None
    record = MatchesOracle().judge(evidence).record
    return record.held, record.summary


def test_an_honest_complex_gradient_agrees() -> None:
    held, summary = judged(lambda gradient: gradient)
    assert held, summary


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda g: g.conj().resolve_conj(), "the complex conjugate"),
        (lambda g: g.real.to(g.dtype), "the real parts alone"),
        (lambda g: g * 3, "exactly 3 x the reference: summed over the ranks, not averaged"),
        (lambda g: g * 0.7, "a constant factor 0.7"),
        (lambda g: g * 1j, "+1j of the reference"),
        (torch.zeros_like, "zero"),
        (lambda g: g.roll(1), "unstructured difference"),
    ],
    ids=["conjugate", "real", "sum", "factor", "turned", "zero", "rolled"],
)
def test_a_wrong_complex_gradient_is_characterised(
    change: Callable[[torch.Tensor], torch.Tensor], text: str
) -> None:
    held, summary = judged(change)
    assert not held
    assert summary.startswith("step 1, gradient 'turns' on rank 2")
    assert text in summary


def test_the_part_with_the_larger_error_is_reported() -> None:
    oracle = run_oracle(TRAINING, 3)
    whole = oracle.steps[1].gradients["turns"]
    assert whole is not None

    def off(gradient: torch.Tensor) -> torch.Tensor:
        changed = gradient.clone()
        changed.imag[2] += 0.5
        return changed

    _, summary = judged(off)
    assert f"at [2] got {whole[2].imag.item() + 0.5:.5f}" in summary
    assert f"expected {whole[2].imag.item():.9g}, error 0.5, " in summary


def test_the_oracle_keeps_the_complex_buffers_of_the_model() -> None:
    oracle = run_oracle(replace(TRAINING, problem=ROTARY), 2)
    built = ROTARY.build().get_buffer("turns")
    for buffers in oracle.buffers:
        assert torch.equal(buffers["turns"], built.to(torch.complex128))
    assert oracle.constants == {"turns"}


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=lambda o: o.name)
def test_complex_parameters_may_round(optimizer: Sgd | AdamW) -> None:
    oracle = run_oracle(replace(TRAINING, optimizer=optimizer), 2)
    parameter = TensorKey(quantity=Quantity.PARAMETER, step=1, name="turns")
    assert 0 < allowed_error(oracle, parameter) < 1e-4
    assert oracle.dtype(Quantity.PARAMETER, "turns") is torch.complex64
