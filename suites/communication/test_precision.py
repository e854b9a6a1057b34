"""Gradients cross between ranks in the dtype asked for; the parameters' own unless the plan says so."""

from __future__ import annotations

import pytest
import torch

from fixtures.optimizers import SGD
from fixtures.problems import MLP_EVEN
from shardproof import SEVERAL, Dtype, MatchesOracle, Op, Phase, Plan, RanksAgree, Select, Training, Trial

IN_BACKWARD = Select(phases=(Phase.BACKWARD,))
REDUCTIONS = Select(ops=(Op.ALL_REDUCE, Op.REDUCE_SCATTER), phases=(Phase.BACKWARD,))


@pytest.mark.kills("ReducesInBfloat16")
@pytest.mark.worlds(SEVERAL)
def test_reduces_in_the_parameters_dtype(trial: Trial) -> None:
    training = Training(problem=MLP_EVEN, optimizer=SGD, plan=Plan(units=MLP_EVEN.units))
    trial.holds(training, Dtype(select=IN_BACKWARD, dtype="float32"), RanksAgree())


@pytest.mark.kills("KeepsFloat32OnTheWire")
@pytest.mark.worlds(SEVERAL)
def test_reduces_in_bfloat16_when_asked(trial: Trial) -> None:
    plan = Plan(units=MLP_EVEN.units, reduce_dtype=torch.bfloat16)
    training = Training(problem=MLP_EVEN, optimizer=SGD, plan=plan)
    trial.holds(training, Dtype(select=REDUCTIONS, dtype="bfloat16"), MatchesOracle(), RanksAgree())
