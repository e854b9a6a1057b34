"""Gradients kept local until the last microbatch must still add up over all of them."""

from __future__ import annotations

from operator import attrgetter

import pytest

from engine.contract import Accumulation, Plan
from fixtures.optimizers import ADAMW, SGD
from fixtures.problems import MLP_EVEN, MLP_UNEVEN
from harness.case import NamedOptimizer, Problem, Schedule, Training
from harness.ledger.agreement import RanksAgree
from harness.parity import MatchesOracle
from harness.pytest_plugin import Trial

name = attrgetter("name")


@pytest.mark.parametrize("microbatches", [3, 4], ids="m{}".format)
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=name)
@pytest.mark.parametrize("problem", [MLP_EVEN, MLP_UNEVEN], ids=name)
def test_accumulates_every_microbatch(
    trial: Trial, problem: Problem, optimizer: NamedOptimizer, microbatches: int
) -> None:
    training = Training(
        problem=problem,
        optimizer=optimizer,
        plan=Plan(units=problem.units, accumulation=Accumulation.LAST_MICROBATCH),
        schedule=Schedule(microbatches=microbatches),
    )
    trial.holds(training, MatchesOracle(), RanksAgree())
