"""Modules that run several times before backward, in one forward or in several."""

from __future__ import annotations

import pytest

from shardproof import AllForwardsFirst, Backwards, Layout, MatchesOracle, RanksAgree, Trial
from shardproof.fixtures.problems import MLP_UNEVEN
from shardproof.fixtures.reused import REUSED
from shardproof.suites.training import train, train_sharded


@pytest.mark.rows("T13", "R09")
@pytest.mark.kills("CountsTheFirstUseAlone")
@pytest.mark.parametrize("layout", [Layout.REPLICATE, Layout.SHARD], ids=lambda layout: layout.name.lower())
def test_a_module_learns_from_each_of_its_runs(trial: Trial, layout: Layout) -> None:
    trial.holds(train(REUSED, layout=layout), MatchesOracle(), RanksAgree())


@pytest.mark.kills("ForgetsEarlierForwards")
@pytest.mark.parametrize("backwards", Backwards, ids=lambda backwards: backwards.name.lower())
def test_every_forward_that_waits_for_backward_counts(trial: Trial, backwards: Backwards) -> None:
    script = AllForwardsFirst(backwards=backwards)
    training = train_sharded(MLP_UNEVEN, microbatches=2, script=script)
    trial.holds(training, MatchesOracle(), RanksAgree())
