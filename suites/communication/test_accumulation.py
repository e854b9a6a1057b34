"""While gradients accumulate nothing is reduced; the last microbatch reduces for all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardproof import SEVERAL, Accumulation, Between, Bytes, Exactly, Layout
from shardproof import Microbatches, Nothing, Op, Phase, RanksAgree, Select, Training, Trial
from shardproof.fixtures.problems import MLP_UNEVEN
from shardproof.suites.closed_forms import GRADIENT_BYTES, PADDED_BYTES
from shardproof.suites.params import parametrize
from shardproof.suites.training import train

pytestmark = pytest.mark.worlds(SEVERAL)

REDUCING = (Op.ALL_REDUCE, Op.REDUCE_SCATTER)
EARLY = Select(ops=REDUCING, dtypes=("float32",), microbatches=Microbatches.ALL_BUT_LAST)
LAST = Select(dtypes=("float32",), phases=(Phase.BACKWARD,), microbatches=Microbatches.LAST)


def _training(layout: Layout, microbatches: int) -> Training:
    return train(
        MLP_UNEVEN, layout=layout, accumulation=Accumulation.LAST_MICROBATCH, microbatches=microbatches
    )


@pytest.mark.kills("SynchronisesEveryMicrobatch")
def test_is_silent_until_the_last_microbatch(trial: Trial) -> None:
    trial.holds(_training(Layout.NATIVE, 3), Nothing(select=EARLY), RanksAgree())


@pytest.mark.rows("R14")
@pytest.mark.kills("ForgetsToSynchroniseOneParameter")
@parametrize("microbatches", 3, 4, ids="m{}".format)
def test_replicas_reduce_once_per_step(trial: Trial, microbatches: int) -> None:
    last = replace(LAST, ops=(Op.ALL_REDUCE,))
    trial.holds(
        _training(Layout.REPLICATE, microbatches),
        Nothing(select=EARLY),
        Bytes(select=last, expected=Exactly(GRADIENT_BYTES), minimum=GRADIENT_BYTES),
        RanksAgree(),
    )


@pytest.mark.rows("T30")
@pytest.mark.kills("SynchronisesEveryMicrobatch", "ReplicatesInsteadOfSharding")
@parametrize("microbatches", 3, 4, ids="m{}".format)
def test_shards_reduce_once_per_step(trial: Trial, microbatches: int) -> None:
    last = replace(LAST, ops=(Op.REDUCE_SCATTER,))
    trial.holds(
        _training(Layout.SHARD, microbatches),
        Nothing(select=EARLY),
        Bytes(select=last, expected=Between(GRADIENT_BYTES, PADDED_BYTES), minimum=GRADIENT_BYTES),
        RanksAgree(),
    )
