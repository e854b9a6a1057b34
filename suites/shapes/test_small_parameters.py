"""Parameters with fewer rows than there are ranks, none at all, or no dim: trained or refused, never wrong."""

from __future__ import annotations

import pytest

from shardproof import EVEN, SEVERAL, HoldsItsShare, Layout, Problem, Refusal, Trial
from shardproof.fixtures.thin import EMPTY_ROWS, SCALARS, SINGLE_ROWS
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY


@pytest.mark.kills("GivesSmallParametersNoGradient")
@parametrize("layout", Layout.SHARD, param(Layout.HYBRID, worlds=EVEN))
def test_trains_single_rows_of_which_most_ranks_own_nothing(trial: Trial, layout: Layout) -> None:
    trial.holds(train(SINGLE_ROWS, layout=layout), *PARITY, HoldsItsShare())


@pytest.mark.worlds(SEVERAL)
@parametrize(
    "problem",
    param(SCALARS, kills=("ForgetsScalars", "RefusesOnOneRank")),
    param(EMPTY_ROWS, kills="MistakesTheNeighbourOfAnEmptyParameter"),
)
def test_trains_or_refuses_parameters_that_cannot_be_cut(trial: Trial, problem: Problem) -> None:
    training = train(problem)
    trial.holds(training, *PARITY, refusal=Refusal.ALLOWED)
