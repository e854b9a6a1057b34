"""Modules that run several times before backward, in one forward or in several."""

from __future__ import annotations

import pytest

from shardproof import AllForwardsFirst, Backwards, Layout, Trial
from shardproof.fixtures.problems import MLP_UNEVEN
from shardproof.fixtures.mlps import REUSED
from shardproof.suites.params import parametrize
from shardproof.suites.training import train, train_sharded
from shardproof.suites.vocabulary import PARITY


@pytest.mark.rows("T13", "R09")
@pytest.mark.kills("CountsTheFirstUseAlone")
@parametrize("layout", Layout.REPLICATE, Layout.SHARD)
def test_a_module_learns_from_each_of_its_runs(trial: Trial, layout: Layout) -> None:
    trial.holds(train(REUSED, layout=layout), *PARITY)


@pytest.mark.kills("ForgetsEarlierForwards")
@parametrize("backwards", *Backwards)
def test_every_forward_that_waits_for_backward_counts(trial: Trial, backwards: Backwards) -> None:
    script = AllForwardsFirst(backwards=backwards)
    training = train_sharded(MLP_UNEVEN, microbatches=2, script=script)
    trial.holds(training, *PARITY)
