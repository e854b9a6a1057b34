"""A forward that raises on every rank, after which it is skipped, or the step is repeated."""

from __future__ import annotations

import pytest

from shardproof import (
    RAISED,
    Accumulation,
    Eventful,
    Fail,
    FailsFirst,
    Interlude,
    Layout,
    Notes,
    Reshard,
    Trial,
)
from shardproof.fixtures.mlps import GUARDED
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train, train_sharded
from shardproof.suites.vocabulary import PARITY

LAWS = (*PARITY, Notes(subject=RAISED, value="FloatingPointError"))


@pytest.mark.rows("T21")
@pytest.mark.kills("DropsEarlierBackwards", "NeverRecovers")
@parametrize("reshard", param(Reshard.AFTER_FORWARD, id="freed"), param(Reshard.KEEP, id="kept"))
def test_a_forward_that_raised_leaves_nothing_behind(trial: Trial, reshard: Reshard) -> None:
    script = Eventful(moves=((Interlude.END, Fail(keeps_gradients=True)),))
    trial.holds(train_sharded(GUARDED, reshard=reshard, script=script), *LAWS)


@pytest.mark.kills("LeaksTheFailedIteration")
@parametrize("layout", Layout.REPLICATE, param(Layout.SHARD, kills="NeverRecovers"))
def test_nothing_of_the_iteration_that_failed_is_learnt(trial: Trial, layout: Layout) -> None:
    script = FailsFirst()
    training = train(
        GUARDED, layout=layout, accumulation=Accumulation.LAST_MICROBATCH, microbatches=3, script=script
    )
    trial.holds(training, *LAWS)
