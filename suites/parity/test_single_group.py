"""One communication group over the whole model."""

from __future__ import annotations


import pytest

from shardproof import NamedOptimizer, Trial
from shardproof.fixtures.optimizers import ADAMW, SGD
from shardproof.fixtures.problems import MLP_BUFFERS, SINGLE_GROUP
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import TRAINS


@pytest.mark.rows("T07", "R05")
@parametrize(
    "optimizer, microbatches",
    param(SGD, 1, id="sgd-m1", kills=("DriftsByOneBit", "ShowsTheStateOfTheStepBefore")),
    param(ADAMW, 1, id="adamw-m1", kills="SumsInsteadOfAveraging"),
    param(SGD, 3, id="sgd-m3", kills="KeepsOnlyTheLastMicrobatch"),
    param(ADAMW, 4, id="adamw-m4", kills="DoublesGradientsEveryMicrobatch"),
)
def test_trains_the_same_model(trial: Trial, optimizer: NamedOptimizer, microbatches: int) -> None:
    training = train(SINGLE_GROUP, optimizer, microbatches=microbatches)
    trial.holds(training, *TRAINS)


@pytest.mark.kills("ForgetsToSynchroniseOneParameter")
@parametrize("microbatches", 1, 3, ids="m{}".format)
def test_keeps_buffers(trial: Trial, microbatches: int) -> None:
    training = train(MLP_BUFFERS, units=(), microbatches=microbatches)
    trial.holds(training, *TRAINS)
