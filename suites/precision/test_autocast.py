"""Models that round by themselves: what they round is no fault of the engine, and hides none of its own."""

from __future__ import annotations

import pytest

from fixtures.autocast import AUTOCAST
from fixtures.optimizers import SGD
from shardproof import SEVERAL, MatchesOracle, Plan, RanksAgree, Schedule, Training, Trial


@pytest.mark.kills("SumsInsteadOfAveraging", "KeepsOnlyTheLastMicrobatch")
@pytest.mark.worlds(SEVERAL)
def test_trains_a_model_under_autocast(trial: Trial) -> None:
    training = Training(
        problem=AUTOCAST,
        optimizer=SGD,
        plan=Plan(units=AUTOCAST.units),
        schedule=Schedule(microbatches=2),
    )
    trial.holds(training, MatchesOracle(), RanksAgree())
