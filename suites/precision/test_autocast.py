"""Models that round by themselves: their rounding is no fault of the engine, and hides none of its faults."""

from __future__ import annotations

import pytest

from shardproof import SEVERAL, Trial
from shardproof.fixtures.mlps import AUTOCAST
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY


@pytest.mark.kills("SumsInsteadOfAveraging", "KeepsOnlyTheLastMicrobatch")
@pytest.mark.worlds(SEVERAL)
def test_trains_a_model_under_autocast(trial: Trial) -> None:
    training = train(AUTOCAST, microbatches=2)
    trial.holds(training, *PARITY)
