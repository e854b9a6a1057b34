"""A rank in a world of one trains the same model without a collective."""

from __future__ import annotations

import pytest

from shardproof import ALONE, Layout, MatchesOracle, Nothing, Select, Trial, Window
from shardproof.fixtures.optimizers import ADAMW
from shardproof.fixtures.placements import UNEVEN_GROUP
from shardproof.suites.training import train

ANYTHING = Select(window=Window.TRAINING)


@pytest.mark.rows("T38", "C30")
@pytest.mark.kills("CommunicatesAlone")
@pytest.mark.worlds(ALONE)
def test_a_lone_rank_communicates_nothing(trial: Trial) -> None:
    training = train(UNEVEN_GROUP, ADAMW, layout=Layout.SHARD, microbatches=2)
    trial.holds(training, Nothing(select=ANYTHING), MatchesOracle())
