"""Forwards of later microbatches run before backwards of earlier ones, as on a stage of a pipeline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardproof import SEVERAL, Accumulation, Count, Eventful, Exactly, Grouping, Interleaved, Layout
from shardproof import Microbatches, Nothing, Op, Per, Phase, Reshard, Script, Select, Training, Trial
from shardproof.fixtures.chain import CHAIN
from shardproof.suites.closed_forms import NUM_GROUPS
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import GATHERS, PARITY

pytestmark = pytest.mark.rows("T31")

NUM_MICROBATCHES = 3
LAST = Microbatches.LAST
REDUCTIONS = Select(ops=(Op.REDUCE_SCATTER, Op.ALL_REDUCE), phases=(Phase.BACKWARD,))
ONCE = (
    Nothing(select=replace(REDUCTIONS, microbatches=Microbatches.ALL_BUT_LAST)),
    Count(select=replace(REDUCTIONS, microbatches=LAST), expected=Exactly(NUM_GROUPS)),
)


@pytest.mark.worlds(SEVERAL)
@parametrize(
    "layout, reshard",
    param(Layout.SHARD, Reshard.AFTER_FORWARD, id="freed"),
    param(Layout.SHARD, Reshard.KEEP, id="kept"),
    param(Layout.REPLICATE, Reshard.NATIVE, id="replicated", rows="R15"),
)
@pytest.mark.kills("ForgetsEarlierForwards")
def test_one_forward_one_backward_reduces_once(trial: Trial, layout: Layout, reshard: Reshard) -> None:
    trial.holds(_training(layout, reshard, Interleaved(ahead=1)), *ONCE, *PARITY)


@pytest.mark.kills("ForgetsEarlierForwards", "FreesHeldUnitsAfterBackward", "SynchronisesEveryMicrobatch")
@pytest.mark.worlds(SEVERAL)
def test_units_kept_all_step_are_gathered_once(trial: Trial) -> None:
    once = Count(select=GATHERS, expected=Exactly(NUM_GROUPS), per=Per.STEP)
    script = Eventful(inner=Interleaved(ahead=1), kept_until_last=True)
    trial.holds(_training(Layout.SHARD, Reshard.KEEP, script), once, *ONCE, *PARITY)


@pytest.mark.kills("ForgetsEarlierForwards")
@parametrize(
    "accumulation",
    param(Accumulation.EVERY_MICROBATCH, id="each"),
    param(Accumulation.LAST_MICROBATCH, id="last"),
)
def test_all_forwards_may_come_first(trial: Trial, accumulation: Accumulation) -> None:
    training = _training(
        Layout.SHARD, Reshard.AFTER_FORWARD, Interleaved(ahead=NUM_MICROBATCHES), accumulation
    )
    trial.holds(training, *PARITY)


def _training(
    layout: Layout,
    reshard: Reshard,
    script: Script,
    accumulation: Accumulation = Accumulation.LAST_MICROBATCH,
) -> Training:
    return train(
        CHAIN,
        layout=layout,
        grouping=Grouping.REQUIRED,
        reshard=reshard,
        accumulation=accumulation,
        microbatches=NUM_MICROBATCHES,
        script=script,
    )
