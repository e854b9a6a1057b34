"""Evaluations before and amid training: they change nothing of it."""

from __future__ import annotations

import pytest

from fixtures.optimizers import SGD
from fixtures.problems import MLP_EVEN
from shardproof import (
    Evaluates,
    Evaluation,
    EvaluationPoint,
    Layout,
    MatchesOracle,
    Plan,
    RanksAgree,
    Training,
    Trial,
)

# The root owns the last layer: engines keep its parameters longest.
UNITS = MLP_EVEN.units[:-1]
LAWS = (MatchesOracle(), RanksAgree())
both_layouts = pytest.mark.parametrize(
    "layout", [Layout.REPLICATE, Layout.SHARD], ids=lambda layout: layout.name.lower()
)


@pytest.mark.kills("ComputesWithWhatAnEvaluationSaw")
@both_layouts
def test_an_evaluation_before_the_step_leaves_nothing_stale(trial: Trial, layout: Layout) -> None:
    script = Evaluates(moment=EvaluationPoint.BEFORE_STEP)
    plan = Plan(layout=layout, units=UNITS)
    trial.holds(Training(problem=MLP_EVEN, optimizer=SGD, plan=plan, script=script), *LAWS)


@pytest.mark.kills("KeepsAnInferenceTensor")
@both_layouts
def test_trains_after_an_evaluation_in_inference_mode(trial: Trial, layout: Layout) -> None:
    script = Evaluates(moment=EvaluationPoint.BEFORE_TRAINING, how=Evaluation.INFERENCE)
    plan = Plan(layout=layout, units=UNITS)
    trial.holds(Training(problem=MLP_EVEN, optimizer=SGD, plan=plan, script=script), *LAWS)
