"""Options that exclude each other are refused loudly, by every rank: whichever won, the other would be lost."""

from __future__ import annotations

import pytest

from shardproof import ODD, Layout, MatchesOracle, Placement, Plan, Refusal, Reshard, Training, Trial
from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.placements import DIVISIBLE_MLP

CONTRADICTIONS = [
    # What every rank holds whole is sharded along no dim, and not freed.
    pytest.param(
        Plan(layout=Layout.REPLICATE, placement=Placement.LARGEST),
        id="dim_of_replicas",
        marks=pytest.mark.kills("DropsWhatTheLayoutExcludes"),
    ),
    pytest.param(
        Plan(layout=Layout.REPLICATE, reshard=Reshard.AFTER_FORWARD),
        id="freed_replicas",
        marks=pytest.mark.kills("DropsWhatTheLayoutExcludes"),
    ),
    pytest.param(
        Plan(layout=Layout.SHARD, reshard=Reshard.TO_PAIRS),
        id="pairs_of_odd_ranks",
        marks=[pytest.mark.worlds(ODD), pytest.mark.kills("DropsWhatTheLayoutExcludes")],
    ),
]


@pytest.mark.rows("C24")
@pytest.mark.parametrize("plan", CONTRADICTIONS)
def test_refuses_options_that_exclude_each_other(trial: Trial, plan: Plan) -> None:
    training = Training(problem=DIVISIBLE_MLP, optimizer=SGD, plan=plan)
    trial.holds(training, MatchesOracle(), refusal=Refusal.REQUIRED)
