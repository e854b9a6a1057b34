"""Models that draw random numbers in forward: each rank trains on what it drew itself, recomputation included."""

from __future__ import annotations

import pytest

from fixtures.optimizers import SGD
from fixtures.random_draws import DROPPED, DROPPED_AND_RECOMPUTED, NOISY
from shardproof import MatchesOracle, Plan, Problem, RanksAgree, Schedule, Training, Trial


@pytest.mark.kills("SumsInsteadOfAveraging", "DrawsAlikeOnAllRanks")
@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(DROPPED, id="dropped", marks=pytest.mark.kills("RecomputesWithOtherDraws")),
        pytest.param(
            DROPPED_AND_RECOMPUTED, id="recomputed", marks=pytest.mark.kills("RecomputesWithOtherDraws")
        ),
        pytest.param(NOISY, id="noisy"),
    ],
)
def test_trains_on_what_each_rank_draws(trial: Trial, problem: Problem) -> None:
    training = Training(
        problem=problem,
        optimizer=SGD,
        plan=Plan(units=problem.units),
        schedule=Schedule(microbatches=2),
    )
    trial.holds(training, MatchesOracle(), RanksAgree())
