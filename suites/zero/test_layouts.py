"""Each gradient is reduced once, and each parameter exchanged once, in the optimizer step."""

from __future__ import annotations

from typing import Any

import pytest

from shardproof import SEVERAL, Accumulation, AllWaited, Between, Bytes, HoldsItsShare, Layout, MatchesOracle
from shardproof import MemoryIsExplained, Microbatches, NamedOptimizer, Nothing, Op, Per, Phase, RanksAgree
from shardproof import Select, Training, Trial
from shardproof.fixtures.optimizers import ADAMW, SGD
from shardproof.fixtures.problems import MLP_UNEVEN
from shardproof.suites.closed_forms import ALIGNED_BYTES, GRADIENT_BYTES
from shardproof.suites.training import train

FLOATS = ("float32",)
REDUCING = (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.REDUCE)
SHARING = (Op.ALL_GATHER, Op.BROADCAST)
REDUCTIONS = Select(ops=REDUCING, phases=(Phase.BACKWARD, Phase.STEP), dtypes=FLOATS)
UPDATES = Select(ops=SHARING, phases=(Phase.STEP,), dtypes=FLOATS)
AT_LEAST_ONCE = Between(GRADIENT_BYTES, ALIGNED_BYTES)
LAWS = (MatchesOracle(), HoldsItsShare(), MemoryIsExplained(), RanksAgree())

pytestmark = pytest.mark.worlds(SEVERAL)
either = pytest.mark.parametrize(
    "layout", [Layout.ZERO1, Layout.ZERO2], ids=lambda layout: layout.name.lower()
)


@either
@pytest.mark.parametrize(
    ("optimizer", "microbatches"),
    [
        pytest.param(SGD, 1, id="sgd-m1", marks=pytest.mark.kills("SharesNothing", "SharesBeforeTheUpdate")),
        pytest.param(
            ADAMW,
            3,
            id="adamw-m3",
            marks=pytest.mark.kills("KeepsTheStateOfAllRanks"),
        ),
    ],
)
def test_trains_the_same_model(
    trial: Trial, layout: Layout, optimizer: NamedOptimizer, microbatches: int
) -> None:
    trial.holds(_training(layout, optimizer, microbatches=microbatches), *LAWS)


@either
@pytest.mark.kills("ReducesWholeGradientsFirst", "SharesNothing")
def test_reduces_and_shares_once(trial: Trial, layout: Layout) -> None:
    trial.holds(
        _training(layout),
        Bytes(select=REDUCTIONS, expected=AT_LEAST_ONCE, minimum=GRADIENT_BYTES, per=Per.STEP),
        Bytes(select=UPDATES, expected=AT_LEAST_ONCE, minimum=GRADIENT_BYTES, per=Per.STEP),
        Nothing(select=Select(ops=SHARING, phases=(Phase.FORWARD, Phase.BACKWARD), dtypes=FLOATS)),
        AllWaited(select=UPDATES),
        RanksAgree(),
    )


@either
@pytest.mark.kills("SharesNothing")
def test_accumulates_in_silence(trial: Trial, layout: Layout) -> None:
    early = Select(ops=(*REDUCING, *SHARING), dtypes=FLOATS, microbatches=Microbatches.ALL_BUT_LAST)
    training = _training(layout, microbatches=3, accumulation=Accumulation.LAST_MICROBATCH)
    once = Bytes(select=REDUCTIONS, expected=AT_LEAST_ONCE, minimum=GRADIENT_BYTES, per=Per.STEP)
    trial.holds(training, *LAWS, Nothing(select=early), once)


def _training(
    layout: Layout,
    optimizer: NamedOptimizer = SGD,
    **asked: Any,  # as for `train`
) -> Training:
    return train(MLP_UNEVEN, optimizer, layout=layout, **asked)
