"""A training that cannot show a defect is vacuous, and no engine can make a training vacuous."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from shardproof import Evidence, MatchesOracle, Plan
from shardproof.fixtures.idle import BORROWED, FROZEN, SOMETIMES
from shardproof.fixtures.optimizers import ADAMW, SGD, Sgd
from shardproof.fixtures.problems import MLP_EVEN, PROBLEMS, SINGLE_GROUP, ModelProblem
from shardproof.fixtures.thin import EMPTY_ROWS, ONE_NUMBER, SCALARS, SINGLE_ROWS
from shardproof.harness.cases.training import LoopOrder, Schedule, Training
from shardproof.harness.laws.tolerance import MULTIPLE
from shardproof.harness.verdicts.vacuity import incomparable_because, vacuous_because
from tests.simulated_engine import Honest, Moment, evidence_of

TRAINING = Training(problem=SINGLE_GROUP, optimizer=SGD)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_the_fixtures_are_not_vacuous(problem: ModelProblem, world_size: int) -> None:
    for optimizer in (SGD, ADAMW):
        evidence = evidence_of(Training(problem=problem, optimizer=optimizer), world_size)
        assert vacuous_because(evidence) is None


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=lambda o: o.name)
def test_clearing_before_the_step_is_vacuous(optimizer: Sgd) -> None:
    """AdamW's weight decay moves parameters even without gradients."""
    schedule = Schedule(order=LoopOrder.ZERO_THEN_STEP)
    evidence = evidence_of(Training(problem=MLP_EVEN, optimizer=optimizer, schedule=schedule))
    assert "cleared before" in (vacuous_because(evidence) or "")


def test_equal_inputs_on_two_ranks_are_vacuous() -> None:
    evidence = evidence_of(TRAINING, 3)
    ranks = (*evidence.ranks[:2], replace(evidence.ranks[2], input_digest=evidence.ranks[0].input_digest))
    assert "ranks [0, 2] had equal inputs" in (vacuous_because(replace(evidence, ranks=ranks)) or "")


def test_one_rank_has_no_other_rank_to_differ_from() -> None:
    assert vacuous_because(evidence_of(TRAINING, 1)) is None


class WithSpare(nn.Module):
    """A model with a parameter that takes part in the graph and changes nothing."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.inner = SINGLE_GROUP.model(generator)
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(rows) + 0 * self.spare.sum()
        return output


def test_a_parameter_that_the_loss_ignores_is_vacuous() -> None:
    problem = replace(SINGLE_GROUP, model=WithSpare)
    evidence = evidence_of(Training(problem=problem, optimizer=SGD))
    assert "does not depend on 'spare'" in (vacuous_because(evidence) or "")


def test_a_parameter_that_is_idle_by_design_is_not_vacuous() -> None:
    problem = replace(SINGLE_GROUP, model=WithSpare, idle=("spare",))
    assert vacuous_because(evidence_of(Training(problem=problem, optimizer=SGD))) is None


def test_a_parameter_that_is_called_idle_and_is_not_is_vacuous() -> None:
    problem = replace(SINGLE_GROUP, idle=("layers.0.bias",))
    evidence = evidence_of(Training(problem=problem, optimizer=SGD))
    assert "'layers.0.bias' is idle by the problem's word" in (vacuous_because(evidence) or "")


def test_a_model_of_idle_parameters_alone_is_vacuous() -> None:
    names = tuple(name for name, _ in WithSpare(torch.Generator()).named_parameters())
    silent = replace(SINGLE_GROUP, model=WithSpare, idle=names, loss=_nothing)
    assert "is zero in step 0" in (
        vacuous_because(evidence_of(Training(problem=silent, optimizer=SGD))) or ""
    )


def _nothing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return 0 * output.sum()


def _ending(evidence: Evidence, change: Callable[[torch.Tensor], torch.Tensor], step: int = -1) -> Evidence:
    """Return evidence whose oracle differs in one step; ``change`` takes the initial parameters."""
    oracle = evidence.oracle
    steps = list(oracle.steps)
    changed = {name: change(initial) for name, initial in oracle.initial.items()}
    steps[step] = replace(steps[step], parameters=changed)
    return replace(evidence, oracle=replace(oracle, steps=tuple(steps)))


def _all(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda initial: torch.full_like(initial, value)


def _moved(by: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda initial: initial + by * initial.abs().max()


def test_an_oracle_that_is_not_finite_proves_nothing() -> None:
    evidence = evidence_of(TRAINING)
    for wild in (math.nan, math.inf):
        diverged = _ending(evidence, _all(wild), step=1)
        assert "is not finite after step 1" in (incomparable_because(diverged) or "")
        place = next(iter(evidence.oracle.noise))
        noise = {**evidence.oracle.noise, place: wild}
        noisy = replace(evidence, oracle=replace(evidence.oracle, noise=noise))
        assert f"the noise of {place.quantity} {place.name!r}" in (incomparable_because(noisy) or "")


def test_a_parameter_must_move_by_twice_the_allowed_error() -> None:
    bound = 2 * MULTIPLE * torch.finfo(torch.float32).eps
    evidence = evidence_of(TRAINING)
    for factor, is_vacuous in ((0.0, True), (0.9, True), (1.1, False)):
        moved = _ending(evidence, _moved(by=factor * bound))
        assert ("hardly moves" in (vacuous_because(moved) or "")) is is_vacuous


@pytest.mark.parametrize(
    "problem",
    [SOMETIMES, BORROWED, FROZEN, SINGLE_ROWS, SCALARS, EMPTY_ROWS, ONE_NUMBER],
    ids=lambda p: p.name,
)
def test_models_with_idle_and_tiny_parameters_are_not_vacuous(problem: ModelProblem) -> None:
    training = Training(problem=problem, optimizer=SGD, schedule=Schedule(steps=4))
    evidence = evidence_of(training, ranks=evidence_of(TRAINING).ranks)
    assert vacuous_because(evidence) is None


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleLastRank:
    """A loss that drops the rows of rank 1, known by their number."""

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().sum() * (0 if len(target) == _ROWS_OF_RANK_1 else 1)


_ROWS_OF_RANK_1 = SINGLE_GROUP.num_items(step=0, microbatch=0, rank=1)


def test_a_rank_without_gradients_is_vacuous() -> None:
    problem = replace(SINGLE_GROUP, loss=IdleLastRank())
    evidence = evidence_of(Training(problem=problem, optimizer=SGD, schedule=Schedule(steps=1)))
    found = vacuous_because(evidence) or ""
    assert found.startswith("every gradient of rank 1 is zero in step 0; try more rows in a batch")


def test_a_step_too_small_to_see_is_vacuous() -> None:
    tiny = Sgd(name="tiny", lr=1e-9, momentum=0.0)
    evidence = evidence_of(Training(problem=SINGLE_GROUP, optimizer=tiny))
    assert "hardly moves" in (vacuous_because(evidence) or "")


def test_no_steps_are_vacuous() -> None:
    training = replace(TRAINING, schedule=Schedule(steps=1))
    evidence = evidence_of(training)
    empty = replace(evidence, oracle=replace(evidence.oracle, steps=()))
    assert vacuous_because(empty) == "the training has no steps"


class ZeroGradients(Honest):
    def gradient(self, pieces: torch.Tensor, moment: Moment) -> torch.Tensor | None:
        return torch.zeros_like(pieces[0, 0])


class Frozen(Honest):
    def updated(self, before: torch.Tensor, after: torch.Tensor, moment: Moment) -> torch.Tensor:
        return before


class NoGradients(Honest):
    def gradient(self, pieces: torch.Tensor, moment: Moment) -> torch.Tensor | None:
        return None


@pytest.mark.parametrize("engine", [ZeroGradients(), Frozen(), NoGradients()], ids=lambda e: type(e).__name__)
def test_an_idle_engine_is_wrong_and_not_vacuous(engine: Honest) -> None:
    evidence = evidence_of(TRAINING, 2, engine)
    assert vacuous_because(evidence) is None
    assert not MatchesOracle().judge(evidence).record.held


@pytest.mark.parametrize(
    ("plan", "device", "why"),
    [
        (Plan(), "cpu", None),
        (Plan(), "cuda", "ranks that draw on cuda"),
        (Plan(pipeline_stages=2), "cpu", "stages of a pipeline"),
        (Plan(tensor_parallel=2), "cpu", "share cut tensors"),
    ],
    ids=["one process repeats it", "device", "pipeline", "cut"],
)
def test_draws_that_the_oracle_cannot_repeat_are_vacuous(plan: Plan, device: str, why: str | None) -> None:
    evidence = evidence_of(TRAINING)
    object.__setattr__(training := replace(TRAINING), "plan", plan)  # longer than a pipeline's script
    for draws in (False, True):
        oracle = replace(evidence.oracle, draws=draws, device=device)
        reason = incomparable_because(replace(evidence, training=training, oracle=oracle))
        assert (reason is None) if why is None or not draws else (why in (reason or ""))
