"""One communication group over the whole model."""

from __future__ import annotations

from operator import attrgetter

import pytest

from fixtures.optimizers import ADAMW, SGD
from fixtures.problems import MLP_BUFFERS, SINGLE_GROUP
from harness.case import NamedOptimizer, Schedule, Training
from harness.ledger.agreement import RanksAgree
from harness.parity import MatchesOracle
from harness.pytest_plugin import Trial

name = attrgetter("name")


@pytest.mark.parametrize("microbatches", [1, 3, 4], ids="m{}".format)
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=name)
def test_trains_the_same_model(trial: Trial, optimizer: NamedOptimizer, microbatches: int) -> None:
    training = Training(
        problem=SINGLE_GROUP, optimizer=optimizer, schedule=Schedule(microbatches=microbatches)
    )
    trial.holds(training, MatchesOracle(), RanksAgree())


@pytest.mark.parametrize("microbatches", [1, 3], ids="m{}".format)
def test_keeps_buffers(trial: Trial, microbatches: int) -> None:
    training = Training(problem=MLP_BUFFERS, optimizer=SGD, schedule=Schedule(microbatches=microbatches))
    trial.holds(training, MatchesOracle(), RanksAgree())
