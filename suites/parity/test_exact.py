"""Integer arithmetic that float32 holds exactly: the engine must be right to the last bit."""

from __future__ import annotations

import pytest

from shardproof import POWERS_OF_TWO, MatchesOracle, RanksAgree, Trial
from shardproof.fixtures.optimizers import EXACT_SGD
from shardproof.fixtures.problems import EXACT_LINEAR
from shardproof.suites.training import train


@pytest.mark.worlds(POWERS_OF_TWO)
@pytest.mark.parametrize(
    "microbatches",
    [
        pytest.param(1, id="m1", marks=pytest.mark.kills("DriftsByOneBit", "SumsInsteadOfAveraging")),
        pytest.param(4, id="m4", marks=pytest.mark.kills("DriftsByOneBit", "KeepsOnlyTheLastMicrobatch")),
    ],
)
def test_is_exact_to_the_bit(trial: Trial, microbatches: int) -> None:
    training = train(EXACT_LINEAR, EXACT_SGD, units=(), steps=2, microbatches=microbatches)
    trial.holds(training, MatchesOracle(), RanksAgree())
