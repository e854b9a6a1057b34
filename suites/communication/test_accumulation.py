"""While gradients accumulate nothing is reduced; the last microbatch reduces for all."""

from __future__ import annotations

import pytest

from engine.contract import Accumulation, Layout, Plan
from fixtures.optimizers import SGD
from fixtures.problems import MLP_UNEVEN
from harness.case import Schedule, Training
from harness.ledger.agreement import RanksAgree
from harness.ledger.entry import Op, Phase
from harness.ledger.expectation import Between, Exactly
from harness.ledger.laws import Bytes, Nothing
from harness.ledger.selection import Microbatches, Select
from harness.pytest_plugin import Trial
from harness.worlds.sizes import SEVERAL
from suites.communication.closed_forms import GRADIENT_BYTES, PADDED_BYTES

REDUCING = (Op.ALL_REDUCE, Op.REDUCE_SCATTER)
EARLY = Select(ops=REDUCING, microbatches=Microbatches.ALL_BUT_LAST)


def _training(layout: Layout, microbatches: int) -> Training:
    plan = Plan(layout=layout, units=MLP_UNEVEN.units, accumulation=Accumulation.LAST_MICROBATCH)
    return Training(
        problem=MLP_UNEVEN, optimizer=SGD, plan=plan, schedule=Schedule(microbatches=microbatches)
    )


@pytest.mark.worlds(SEVERAL)
@pytest.mark.parametrize("microbatches", [3, 4], ids="m{}".format)
def test_replicas_reduce_once_per_step(trial: Trial, microbatches: int) -> None:
    last = Select(ops=(Op.ALL_REDUCE,), phases=(Phase.BACKWARD,), microbatches=Microbatches.LAST)
    trial.holds(
        _training(Layout.REPLICATE, microbatches),
        Nothing(select=EARLY),
        Bytes(select=last, expected=Exactly(GRADIENT_BYTES), minimum=GRADIENT_BYTES),
        RanksAgree(),
    )


@pytest.mark.worlds(SEVERAL)
@pytest.mark.parametrize("microbatches", [3, 4], ids="m{}".format)
def test_shards_reduce_once_per_step(trial: Trial, microbatches: int) -> None:
    last = Select(ops=(Op.REDUCE_SCATTER,), phases=(Phase.BACKWARD,), microbatches=Microbatches.LAST)
    trial.holds(
        _training(Layout.SHARD, microbatches),
        Nothing(select=EARLY),
        Bytes(select=last, expected=Between(GRADIENT_BYTES, PADDED_BYTES), minimum=GRADIENT_BYTES),
        RanksAgree(),
    )
