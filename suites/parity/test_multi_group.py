"""One communication group per unit of the model; shapes that no world size divides."""

from __future__ import annotations

from operator import attrgetter

import pytest

from engine.contract import Plan
from fixtures.optimizers import ADAMW, SGD
from fixtures.problems import MLP_EVEN, MLP_UNEVEN, TRANSFORMER
from harness.case import NamedOptimizer, Problem, Schedule, Training
from harness.ledger.agreement import RanksAgree
from harness.parity import MatchesOracle
from harness.pytest_plugin import Trial

name = attrgetter("name")


@pytest.mark.parametrize("microbatches", [1, 3, 4], ids="m{}".format)
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=name)
@pytest.mark.parametrize("problem", [MLP_EVEN, MLP_UNEVEN], ids=name)
def test_trains_the_same_model(
    trial: Trial, problem: Problem, optimizer: NamedOptimizer, microbatches: int
) -> None:
    training = Training(
        problem=problem,
        optimizer=optimizer,
        plan=Plan(units=problem.units),
        schedule=Schedule(microbatches=microbatches),
    )
    trial.holds(training, MatchesOracle(), RanksAgree())


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=name)
def test_trains_the_same_transformer(trial: Trial, optimizer: NamedOptimizer) -> None:
    training = Training(problem=TRANSFORMER, optimizer=optimizer, plan=Plan(units=TRANSFORMER.units))
    trial.holds(training, MatchesOracle(), RanksAgree())
