"""Evaluations before and amid training: they change nothing of it."""

from __future__ import annotations

import pytest

from engine.contract import Layout
from fixtures.problems import MLP_EVEN
from harness.cases.script import Evaluation
from harness.cases.scripts.recovery import Evaluates, Moment
from harness.laws.communication.matching import RanksAgree
from harness.laws.parity import MatchesOracle
from harness.runner.fixture import Trial
from suites.training import train

# The root owns the last layer: engines keep its parameters longest.
UNITS = MLP_EVEN.units[:-1]
LAWS = (MatchesOracle(), RanksAgree())
both_layouts = pytest.mark.parametrize(
    "layout", [Layout.REPLICATE, Layout.SHARD], ids=lambda layout: layout.name.lower()
)


@pytest.mark.kills("ComputesWithWhatAnEvaluationSaw")
@both_layouts
def test_an_evaluation_before_the_step_leaves_nothing_stale(trial: Trial, layout: Layout) -> None:
    script = Evaluates(moment=Moment.BEFORE_STEP)
    trial.holds(train(MLP_EVEN, layout=layout, units=UNITS, script=script), *LAWS)


@pytest.mark.kills("KeepsAnInferenceTensor")
@both_layouts
def test_trains_after_an_evaluation_in_inference_mode(trial: Trial, layout: Layout) -> None:
    script = Evaluates(moment=Moment.BEFORE_TRAINING, how=Evaluation.INFERENCE)
    trial.holds(train(MLP_EVEN, layout=layout, units=UNITS, script=script), *LAWS)
