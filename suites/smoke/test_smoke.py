"""The least that an engine must do."""

from __future__ import annotations

import pytest

from fixtures.optimizers import SGD
from fixtures.problems import MLP_EVEN
from shardproof import MatchesOracle, RanksAgree, Training, Trial


@pytest.mark.rows("T07", "R05")
@pytest.mark.kills("SumsInsteadOfAveraging", "NeverSynchronises", "StepsBeforeTheReduction")
@pytest.mark.kills("StartsOtherRanksAnew", "OrdersParametersByRank", "IgnoresMoreOnTheLastRank")
@pytest.mark.kills("AddsGradientsToParameters", "RepeatsTheSecondGradients", "KeepsOneOldGradient")
def test_trains_the_same_model(trial: Trial) -> None:
    trial.holds(Training(problem=MLP_EVEN, optimizer=SGD), MatchesOracle(), RanksAgree())
