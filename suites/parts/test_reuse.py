"""Modules that run several times before backward, in one forward or in several."""

from __future__ import annotations

import pytest

from fixtures.optimizers import SGD
from fixtures.problems import MLP_UNEVEN
from fixtures.reused import REUSED
from shardproof import (
    AllForwardsFirst,
    Backwards,
    Grouping,
    Layout,
    MatchesOracle,
    Plan,
    RanksAgree,
    Schedule,
    Training,
    Trial,
)


@pytest.mark.rows("T13", "R09")
@pytest.mark.kills("CountsTheFirstUseAlone")
@pytest.mark.parametrize("layout", [Layout.REPLICATE, Layout.SHARD], ids=lambda layout: layout.name.lower())
def test_a_module_learns_from_each_of_its_runs(trial: Trial, layout: Layout) -> None:
    plan = Plan(layout=layout, units=REUSED.units)
    trial.holds(Training(problem=REUSED, optimizer=SGD, plan=plan), MatchesOracle(), RanksAgree())


@pytest.mark.kills("ForgetsEarlierForwards")
@pytest.mark.parametrize("backwards", Backwards, ids=lambda backwards: backwards.name.lower())
def test_every_forward_that_waits_for_backward_counts(trial: Trial, backwards: Backwards) -> None:
    script = AllForwardsFirst(backwards=backwards)
    plan = Plan(
        layout=Layout.SHARD, units=MLP_UNEVEN.units, grouping=Grouping.REQUIRED, demands=script.demands
    )
    training = Training(
        problem=MLP_UNEVEN,
        optimizer=SGD,
        plan=plan,
        schedule=Schedule(microbatches=2),
        script=script,
    )
    trial.holds(training, MatchesOracle(), RanksAgree())
