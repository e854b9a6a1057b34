"""A model converted after preparation trains in the new dtype, from parameters to communication."""

from __future__ import annotations

import pytest
import torch

from shardproof import Trial
from shardproof.fixtures.optimizers import ADAMW
from shardproof.fixtures.problems import MLP_UNEVEN
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY


@pytest.mark.rows("T06", "R04")
@pytest.mark.kills("ReducesInTheDtypeOfBefore")
def test_trains_in_float64_once_converted(trial: Trial) -> None:
    training = train(MLP_UNEVEN, ADAMW, microbatches=2, convert=torch.float64)
    trial.holds(training, *PARITY)
