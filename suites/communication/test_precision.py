"""Gradients cross between ranks in the dtype asked for; the parameters' own unless the plan says so."""

from __future__ import annotations

import pytest
import torch

from shardproof import SEVERAL, Dtype, MatchesOracle, Op, Phase, RanksAgree, Select, Trial
from shardproof.fixtures.problems import MLP_EVEN
from shardproof.suites.training import train

IN_BACKWARD = Select(phases=(Phase.BACKWARD,))
REDUCTIONS = Select(ops=(Op.ALL_REDUCE, Op.REDUCE_SCATTER), phases=(Phase.BACKWARD,))


@pytest.mark.kills("ReducesInBfloat16")
@pytest.mark.worlds(SEVERAL)
def test_reduces_in_the_parameters_dtype(trial: Trial) -> None:
    training = train(MLP_EVEN)
    trial.holds(training, Dtype(select=IN_BACKWARD, dtype="float32"), RanksAgree())


@pytest.mark.kills("KeepsFloat32OnTheWire")
@pytest.mark.worlds(SEVERAL)
def test_reduces_in_bfloat16_when_asked(trial: Trial) -> None:
    training = train(MLP_EVEN, reduce_dtype=torch.bfloat16)
    trial.holds(training, Dtype(select=REDUCTIONS, dtype="bfloat16"), MatchesOracle(), RanksAgree())
