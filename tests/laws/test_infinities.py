"""Infinities are compared as such, and zeros may stand for absent gradients only where an engine declares that."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn

from shardproof import Clip, Evidence, MatchesOracle, Schedule, Shard, Training, TrialSession, Verdict
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.engine.contract import Capability, Layout, NoGradient, Plan, shard_of
from shardproof.fixtures.buffered import MASKED, NORMALISED, REPLACED, Masked
from shardproof.fixtures.idle import SOMETIMES
from shardproof.fixtures.optimizers import ADAMW, SGD
from shardproof.fixtures.problems import MLP_EVEN, ModelProblem
from shardproof.harness.laws.tolerance import allowed_error
from shardproof.harness.oracle.absolute_error import deviation, largest
from shardproof.harness.oracle.oracle import run_oracle
from shardproof.harness.oracle.oracle_observation import OracleObservation, Quantity, TensorKey
from shardproof.harness.records.observation import Observation, StepObservation
from shardproof.harness.verdicts.vacuity import incomparable_because, vacuous_because
from tests.judging import judged
from tests.simulated_engine import evidence_of, oracle_of, row_shard, simulate

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("got", "expected", "error"),
    [
        (1.5, 1.25, 0.25),
        (INF, INF, 0.0),
        (-INF, -INF, 0.0),
        (INF, -INF, INF),
        (0.0, -INF, INF),
        (INF, 3e38, INF),
        (NAN, 0.0, INF),
        (0.0, NAN, INF),
        (NAN, NAN, INF),
        (NAN, INF, INF),
    ],
)
def test_infinities_are_the_same_or_infinitely_far(got: float, expected: float, error: float) -> None:
    pair = torch.tensor([got]), torch.tensor([expected], dtype=torch.float64)
    assert deviation(*pair).tolist() == [error]
    assert deviation(*pair).dtype is torch.float64
    assert deviation(torch.tensor(got), torch.tensor(expected)).item() == error


def test_the_largest_is_the_largest_finite_one() -> None:
    assert largest(torch.tensor([-INF, 2.0, -3.0, NAN])) == 3.0
    assert largest(torch.tensor([-INF, NAN])) == 0.0
    assert largest(torch.empty(0)) == 0.0
    assert largest(torch.tensor([False, True])) == 1.0


def training_of(problem: ModelProblem) -> Training:
    return Training(problem=problem, optimizer=SGD)


def with_buffer(problem: ModelProblem, change: Callable[[torch.Tensor], object], name: str) -> Evidence:
    """Return the evidence of an engine that is honest but for a buffer of its last rank."""
    training = training_of(problem)
    *others, last = simulate(training, 3)
    shard = last.buffers[name]
    changed = shard.tensor.clone()
    change(changed)
    last = replace(last, buffers={**last.buffers, name: replace(shard, tensor=changed)})
    return evidence_of(training, 3, ranks=(*others, last))


def _nothing(mask: torch.Tensor) -> None:
    """Change nothing."""


def test_an_honest_mask_agrees_and_shows_something() -> None:
    evidence = with_buffer(MASKED, _nothing, "mask")
    assert MatchesOracle().judge(evidence).record.held
    assert vacuous_because(evidence) is None
    assert evidence.oracle.constants == {"mask"}


def _one(value: float, at: tuple[int, int]) -> Callable[[torch.Tensor], object]:
    return lambda mask: mask[at].fill_(value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda mask: mask.zero_(),
            "on rank 2 (shard at [0, 0]; wrong on 1 of 3 ranks): zero; at [0, 1] got 0",
        ),
        (_one(-1024.0, (0, 1)), "at [0, 1] got -1024, expected -inf, error inf"),
        (_one(INF, (0, 1)), "NaN or infinity; at [0, 1] got inf, expected -inf"),
        (_one(NAN, (0, 1)), "NaN or infinity; at [0, 1] got nan, expected -inf"),
        (_one(-INF, (1, 1)), "NaN or infinity; at [1, 1] got -inf, expected 0"),
        (_one(2.0**-20, (1, 1)), "at [1, 1] got 9.53674316e-07, expected 0, error 9.54e-07, allowed 0"),
    ],
    ids=["zero", "finite", "other-infinity", "nan", "one-more", "small"],
)
def test_another_mask_is_reported(change: Callable[[torch.Tensor], object], text: str) -> None:
    record = MatchesOracle().judge(with_buffer(MASKED, change, "mask")).record
    assert not record.held
    assert "buffer 'mask' on rank 2" in record.summary
    assert text in record.summary


class _Vast(Masked):
    """Masks with the smallest number of the dtype in place of infinity."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__(generator)
        self.mask.clamp_(min=torch.finfo(torch.float32).min)


VAST = replace(MASKED, name="vast", model=_Vast)


def test_vast_numbers_hide_no_small_ones() -> None:
    assert MatchesOracle().judge(with_buffer(VAST, _nothing, "mask")).record.held
    record = MatchesOracle().judge(with_buffer(VAST, _one(0.5, (3, 2)), "mask")).record
    assert "at [3, 2] got 0.5, expected 0, error 0.5, allowed 0" in record.summary


def test_constants_are_buffers_that_no_forward_changes() -> None:
    assert oracle_of(training_of(NORMALISED), 3).constants == {"scale"}
    assert oracle_of(training_of(REPLACED), 3).constants == set()
    oracle = oracle_of(training_of(NORMALISED), 3)
    mean = TensorKey(quantity=Quantity.BUFFER, step=2, name="norm.running_mean")
    assert allowed_error(oracle, mean) > 0
    assert allowed_error(oracle, replace(mean, name="scale")) == 0


def test_a_value_beyond_the_dtype_is_no_constant() -> None:
    for problem, constants in ((NORMALISED, set()), (MASKED, {"mask"})):
        converted = replace(training_of(problem), convert=torch.bfloat16)
        assert run_oracle(converted, 2).constants == constants


class _Explodes(nn.Module):
    """Has infinite gradients, which clipping cannot make finite."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.first = nn.Linear(6, 3)
        self.last = nn.Linear(3, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-0.5, 0.5, generator=generator)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.first(rows)) * 1e300
        return output


def test_a_norm_that_is_infinite_on_both_sides_shows_nothing() -> None:
    problem = replace(NORMALISED, name="explodes", model=_Explodes)
    schedule = Schedule(clip=Clip(max_norm=1.0, norm_type=2.0))
    training = Training(problem=problem, optimizer=SGD, schedule=schedule)
    assert "the oracle itself diverged" in (incomparable_because(evidence_of(training, 3, ranks=())) or "")


def test_a_shard_of_a_mask_is_compared_like_the_whole() -> None:
    whole = oracle_of(training_of(MASKED), 3).buffers[0]["mask"].float()
    shard = Shard(tensor=whole[4:7], offsets=(4, 0), global_shape=tuple(whole.shape))
    assert deviation(shard.tensor, shard.of(whole)).max() == 0


# Zeros for absent gradients.


WORLD_SIZE = 4
STEP = 1
PLAIN = Training(problem=MLP_EVEN, optimizer=SGD, schedule=Schedule(steps=3))


class _Zeros(PreparedDdp):
    def local_gradients(self) -> Mapping[str, Shard | None]:
        owned, shown = self.owned_parameters(), super().local_gradients()
        return {n: shard_of(torch.zeros_like(owned[n])) if s is None else s for n, s in shown.items()}


class _DeclaredZeros(_Zeros):
    no_gradient = NoGradient.ZEROS


class ShowsZeros(DistributedDataParallelEngine):
    """Shows zeros without declaring it."""

    prepared_type = _Zeros


class DeclaresZeros(DistributedDataParallelEngine):
    """Shows zeros and declares it."""

    prepared_type = _DeclaredZeros


class _FilledWithZeros(_DeclaredZeros):
    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        for parameter in self.named.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


class StepsOnZeros(DistributedDataParallelEngine):
    """Passes zeros to its optimizer, as it declares, where no rank has a gradient."""

    prepared_type = _FilledWithZeros


def test_a_parameter_moved_by_weight_decay_on_declared_zeros_is_named(session: TrialSession) -> None:
    plan = Plan(units=SOMETIMES.units, demands=frozenset({Capability.UNUSED}))
    training = Training(problem=SOMETIMES, optimizer=ADAMW, plan=plan, schedule=Schedule(steps=2))
    record = judged(session, f"{__name__}:StepsOnZeros", training=training, laws=(MatchesOracle(),))
    assert record.verdict is Verdict.FAILED
    assert "moved, although no rank used it: weight decay or momentum" in record.headline


@pytest.mark.parametrize(
    ("engine", "verdict", "text"),
    [
        (DeclaresZeros, Verdict.PASSED, "gradients are zeros instead of None, as the engine declares"),
        (ShowsZeros, Verdict.FAILED, "expected None, got zeros"),
    ],
    ids=["declared", "undeclared"],
)
def test_an_engine_declares_zeros_in_its_adapter(
    session: TrialSession, engine: type, verdict: Verdict, text: str
) -> None:
    demands = frozenset({Capability.UNUSED})
    training = Training(
        problem=SOMETIMES,
        optimizer=SGD,
        plan=Plan(units=SOMETIMES.units, demands=demands),
        schedule=Schedule(steps=4),
    )
    record = judged(session, f"{__name__}:{engine.__name__}", training=training, laws=(MatchesOracle(),))
    assert (record.verdict, text in record.headline) == (verdict, True), record.headline
    assert bool(record.declared_zeros) is (engine is DeclaresZeros)


NAME = "layers.1.weight"


def without_a_gradient(oracle: OracleObservation, step: int) -> OracleObservation:
    """Return the oracle of a training in which no loss reaches a parameter in one step."""
    steps = list(oracle.steps)
    steps[step] = replace(steps[step], gradients={**steps[step].gradients, NAME: None})
    return replace(oracle, steps=tuple(steps))


def showing(
    ranks: tuple[Observation, ...], tensor: torch.Tensor, no_gradient: NoGradient
) -> tuple[Observation, ...]:
    """Return the observations of ranks that show a gradient of the parameter after step 1."""

    def shown(rank: int, step: int, seen: StepObservation) -> StepObservation:
        shard = row_shard(tensor, rank, WORLD_SIZE)
        return seen if step != STEP else replace(seen, gradients={**seen.gradients, NAME: shard})

    return tuple(
        replace(o, no_gradient=no_gradient, steps=tuple(shown(o.rank, i, s) for i, s in enumerate(o.steps)))
        for o in ranks
    )


@pytest.mark.parametrize(
    ("scale", "declared", "text"),
    [
        (0.0, NoGradient.ZEROS, None),
        (0.0, NoGradient.NONE, "expected None, got zeros"),
        (1.0, NoGradient.ZEROS, "expected None, got the gradient of step 0 (stale)"),
        (1.0, NoGradient.NONE, "expected None, got the gradient of step 0 (stale)"),
        (1.37, NoGradient.ZEROS, "expected None, got a tensor with values up to"),
    ],
)
def test_zeros_for_no_gradient_are_right_where_declared_and_nothing_else_is(
    scale: float, declared: NoGradient, text: str | None
) -> None:
    plain = run_oracle(PLAIN, WORLD_SIZE)
    before = plain.steps[0].gradients[NAME]
    assert before is not None
    ranks = showing(simulate(PLAIN, WORLD_SIZE, layout=Layout.SHARD), scale * before.float(), declared)
    seen = evidence_of(PLAIN, WORLD_SIZE, ranks=ranks, oracle=without_a_gradient(plain, STEP))
    record = MatchesOracle().judge(seen).record
    if text is None:
        assert record.held
        assert "4 gradients are zeros instead of None, as the engine declares" in record.summary
    else:
        assert not record.held
        assert text in record.summary
