"""A rank that is alone has nobody to communicate with, and trains the same model without a collective."""

from __future__ import annotations

import pytest

from engine.contract import Layout
from fixtures.optimizers import ADAMW
from fixtures.placements import UNEVEN_GROUP
from harness.laws.communication.counts import Nothing
from harness.laws.communication.select import Select, Window
from harness.laws.parity import MatchesOracle
from harness.runner.fixture import Trial
from harness.worlds.sizes import ALONE
from suites.training import train

ANYTHING = Select(window=Window.TRAINING)


@pytest.mark.rows("T38", "C30")
@pytest.mark.kills("CommunicatesAlone")
@pytest.mark.worlds(ALONE)
def test_a_lone_rank_communicates_nothing(trial: Trial) -> None:
    training = train(UNEVEN_GROUP, ADAMW, layout=Layout.SHARD, microbatches=2)
    trial.holds(training, Nothing(select=ANYTHING), MatchesOracle())
