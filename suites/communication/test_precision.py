"""Gradients cross between ranks in the planned dtype, by default that of the parameters."""

from __future__ import annotations

import pytest
import torch

from shardproof import SEVERAL, Dtype, RanksAgree, Trial
from shardproof.fixtures.problems import MLP_EVEN
from shardproof.suites.training import train
from shardproof.suites.vocabulary import IN_BACKWARD, PARITY, REDUCTIONS

pytestmark = pytest.mark.worlds(SEVERAL)


@pytest.mark.kills("ReducesInBfloat16")
def test_reduces_in_the_parameters_dtype(trial: Trial) -> None:
    training = train(MLP_EVEN)
    trial.holds(training, Dtype(select=IN_BACKWARD, dtype="float32"), RanksAgree())


@pytest.mark.kills("KeepsFloat32OnTheWire")
def test_reduces_in_bfloat16_when_asked(trial: Trial) -> None:
    training = train(MLP_EVEN, reduce_dtype=torch.bfloat16)
    trial.holds(training, Dtype(select=REDUCTIONS, dtype="bfloat16"), *PARITY)
