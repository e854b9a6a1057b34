"""Options that change the time of messages, and the owners of shares, do so and change no number."""

from __future__ import annotations

import pytest

from shardproof import SEVERAL, Op, OverlapsBackward, Phase, Select, Trial, Tuning, Watch
from shardproof.fixtures.chain import CHAIN
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


REDUCTIONS = Select(
    ops=(Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.REDUCE),
    phases=(Phase.BACKWARD, Phase.STEP),
    dtypes=("float32",),
)


@pytest.mark.worlds(SEVERAL)
@parametrize(
    "tuning, is_expected",
    param(
        Tuning.OVERLAPPED,
        True,
        id="overlapped",
        kills=("ReducesOnceBackwardIsDone", "WaitsForEachEarlyReduction"),
    ),
    param(Tuning.IN_SEQUENCE, False, id="in_sequence", kills="OverlapsThoughItIsNotTo"),
)
def test_reduces_while_backward_computes_if_asked(trial: Trial, tuning: Tuning, is_expected: bool) -> None:
    training = train(CHAIN, tuning=tuning, watch=frozenset({Watch.RACES}))
    trial.holds(training, OverlapsBackward(select=REDUCTIONS, is_expected=is_expected), *PARITY)
