"""Integer arithmetic that float32 represents exactly: the engine must be right to the last bit."""

from __future__ import annotations

import pytest

from shardproof import POWERS_OF_TWO, Trial
from shardproof.fixtures.optimizers import EXACT_SGD
from shardproof.fixtures.problems import EXACT_LINEAR
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY


@pytest.mark.worlds(POWERS_OF_TWO)
@parametrize(
    "microbatches",
    param(1, id="m1", kills=("DriftsByOneBit", "SumsInsteadOfAveraging")),
    param(4, id="m4", kills=("DriftsByOneBit", "KeepsOnlyTheLastMicrobatch")),
)
def test_is_exact_to_the_bit(trial: Trial, microbatches: int) -> None:
    training = train(EXACT_LINEAR, EXACT_SGD, units=(), steps=2, microbatches=microbatches)
    trial.holds(training, *PARITY)
