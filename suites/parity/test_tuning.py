"""Options that move messages in time, and shares from rank to rank, change no number."""

from __future__ import annotations

import pytest

from shardproof import SEVERAL, Trial, Tuning
from shardproof.fixtures.optimizers import ADAMW
from shardproof.fixtures.problems import MLP_UNEVEN
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY


@pytest.mark.worlds(SEVERAL)
@parametrize("microbatches", 1, 3, ids="m{}".format)
@parametrize(
    "tuning",
    param(Tuning.OVERLAPPED, kills="RefillsABufferInFlight"),
    param(Tuning.IN_SEQUENCE, kills="WaitsForTheFirstReductionAlone"),
    param(Tuning.ROUND_ROBIN, kills="ReducesAsIfNoneTookTurns"),
)
def test_trains_the_same_model_however_it_communicates(
    trial: Trial, tuning: Tuning, microbatches: int
) -> None:
    trial.holds(train(MLP_UNEVEN, ADAMW, tuning=tuning, microbatches=microbatches), *PARITY)
