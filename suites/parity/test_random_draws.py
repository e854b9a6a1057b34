"""Models that draw random numbers in forward: each rank trains on its own draws, recomputation included."""

from __future__ import annotations

import pytest

from shardproof import Problem, Trial
from shardproof.fixtures.random_draws import DROPPED, DROPPED_AND_RECOMPUTED, NOISY
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY


@pytest.mark.device("cpu")  # others draw other numbers than the oracle
@pytest.mark.kills("SumsInsteadOfAveraging", "DrawsAlikeOnAllRanks")
@parametrize(
    "problem",
    param(DROPPED, kills="RecomputesWithOtherDraws"),
    param(DROPPED_AND_RECOMPUTED, id="recomputed", kills="RecomputesWithOtherDraws"),
    NOISY,
)
def test_trains_on_what_each_rank_draws(trial: Trial, problem: Problem) -> None:
    training = train(problem, microbatches=2)
    trial.holds(training, *PARITY)
