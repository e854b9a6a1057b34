"""Parameters with fewer rows than there are ranks, none at all, or no dim: trained or refused, never wrong."""

from __future__ import annotations

import pytest

from shardproof import (
    EVEN,
    SEVERAL,
    HoldsItsShare,
    Layout,
    MatchesOracle,
    Problem,
    RanksAgree,
    Refusal,
    Trial,
)
from shardproof.fixtures.thin import EMPTY_ROWS, SCALARS, SINGLE_ROWS
from shardproof.suites.training import train

LAWS = (MatchesOracle(), RanksAgree())


@pytest.mark.kills("GivesSmallParametersNoGradient")
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout.SHARD, id="shard"),
        pytest.param(Layout.HYBRID, id="hybrid", marks=pytest.mark.worlds(EVEN)),
    ],
)
def test_trains_single_rows_of_which_most_ranks_own_nothing(trial: Trial, layout: Layout) -> None:
    trial.holds(train(SINGLE_ROWS, layout=layout), *LAWS, HoldsItsShare())


@pytest.mark.worlds(SEVERAL)
@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(SCALARS, id="scalars", marks=pytest.mark.kills("ForgetsScalars", "RefusesOnOneRank")),
        pytest.param(
            EMPTY_ROWS, id="empty_rows", marks=pytest.mark.kills("MistakesTheNeighbourOfAnEmptyParameter")
        ),
    ],
)
def test_trains_or_refuses_parameters_that_cannot_be_cut(trial: Trial, problem: Problem) -> None:
    training = train(problem)
    trial.holds(training, *LAWS, refusal=Refusal.ALLOWED)
