"""The minimum for every engine."""

from __future__ import annotations

import pytest

from shardproof import Trial
from shardproof.fixtures.problems import MLP_EVEN
from shardproof.suites.training import train
from shardproof.suites.vocabulary import TRAINS


@pytest.mark.rows("T07", "R05")
@pytest.mark.kills("SumsInsteadOfAveraging", "NeverSynchronises")
@pytest.mark.kills("IgnoresMoreOnTheLastRank")
@pytest.mark.kills("KeepsOneOldGradient")
@pytest.mark.kills("LeavesTheModuleAStepBehind", "ShowsNoGradientsOnTheLastRank")
def test_trains_the_same_model(trial: Trial) -> None:
    trial.holds(train(MLP_EVEN, units=()), *TRAINS)
