"""Units whose reductions are held back reduce once a step, the others in every microbatch.

With G groups, h of them held back, and m microbatches that makes G + (G - h)(m - 1) reductions in a step.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardproof import FOUR_OR_MORE_EVEN, SEVERAL, Accumulation, Count, Exactly, Grouping, Holding
from shardproof import HoldingBack, Layout, Microbatches, Nothing, OnlyThese, Reshard, Select, Training, Trial
from shardproof.fixtures.chain import CHAIN
from shardproof.suites.closed_forms import NUM_GROUPS, NUM_UNHELD_GROUPS
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import ALL_REDUCES, GATHERS_IN_BACKWARD, GATHERS_IN_FORWARD, PARITY
from shardproof.suites.vocabulary import REDUCE_SCATTERS

pytestmark = pytest.mark.worlds(SEVERAL)

NUM_MICROBATCHES = 3
ROOT = ""
EVERY_UNIT = (*CHAIN.units, ROOT)
ALL_GROUPS = Exactly(NUM_GROUPS)
FREED = (
    Count(select=GATHERS_IN_FORWARD, expected=ALL_GROUPS),
    Count(select=GATHERS_IN_BACKWARD, expected=ALL_GROUPS),
)
HELD = [
    param(EVERY_UNIT, id="all", kills=("IgnoresSingleHolds", "LosesWhatItHeldBack")),
    param((ROOT,), id="root", kills=("IgnoresSingleHolds", "HoldsTheWholeTreeBack")),
    param(CHAIN.units[1:3], id="some", kills=("IgnoresSingleHolds", "LosesWhatItHeldBack")),
]


def _reduces(select: Select) -> tuple[Count, Count]:
    """Return how many groups reduce before the last microbatch, and that all do in the last."""
    early = replace(select, microbatches=Microbatches.ALL_BUT_LAST)
    return (
        Count(select=early, expected=Exactly(NUM_UNHELD_GROUPS)),
        Count(select=replace(select, microbatches=Microbatches.LAST), expected=ALL_GROUPS),
    )


@pytest.mark.rows("T30")
@parametrize("units", *HELD)
def test_shards_reduce_as_told(trial: Trial, units: tuple[str, ...]) -> None:
    training = _training(Layout.SHARD, HoldingBack(units=units))
    only = OnlyThese(selects=(GATHERS_IN_FORWARD, GATHERS_IN_BACKWARD, REDUCE_SCATTERS))
    trial.holds(training, *FREED, *_reduces(REDUCE_SCATTERS), only, *PARITY)


@pytest.mark.rows("R14")
@parametrize("units", *HELD)
def test_replicas_reduce_as_told(trial: Trial, units: tuple[str, ...]) -> None:
    training = _training(Layout.REPLICATE, HoldingBack(units=units))
    trial.holds(training, *_reduces(ALL_REDUCES), OnlyThese(selects=(ALL_REDUCES,)), *PARITY)


@pytest.mark.rows("T30")
@pytest.mark.kills("ReducesReplicasAllTheSame")
@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
@parametrize(
    "units", param(EVERY_UNIT, id="all"), param((ROOT,), id="root"), param(CHAIN.units[1:3], id="some")
)
def test_replicas_wait_for_the_last_microbatch_as_told(trial: Trial, units: tuple[str, ...]) -> None:
    script = HoldingBack(units=units, holding=Holding.REPLICAS)
    every_time = Count(select=REDUCE_SCATTERS, expected=ALL_GROUPS)
    trial.holds(_training(Layout.HYBRID, script), *FREED, every_time, *_reduces(ALL_REDUCES), *PARITY)


@pytest.mark.rows("T30")
@pytest.mark.kills("FreesHeldUnitsAfterBackward")
@parametrize("units", param(EVERY_UNIT, id="all"), param((ROOT,), id="root"))
def test_units_kept_after_backward_are_gathered_once(trial: Trial, units: tuple[str, ...]) -> None:
    training = _training(Layout.SHARD, HoldingBack(units=units, keeps=True), Reshard.KEEP)
    first = replace(GATHERS_IN_FORWARD, microbatches=(0,))
    later = replace(GATHERS_IN_FORWARD, microbatches=tuple(range(1, NUM_MICROBATCHES)))
    trial.holds(
        training,
        Count(select=first, expected=ALL_GROUPS),
        Count(select=later, expected=Exactly(NUM_UNHELD_GROUPS)),
        Nothing(select=GATHERS_IN_BACKWARD),
        *_reduces(REDUCE_SCATTERS),
        *PARITY,
    )


@pytest.mark.rows("T30")
@pytest.mark.kills("SynchronisesEveryMicrobatch")
def test_gathers_as_often_whether_accumulating_or_not(trial: Trial) -> None:
    script = HoldingBack(units=())
    training = _training(Layout.SHARD, script)
    plan = replace(training.plan, accumulation=Accumulation.LAST_MICROBATCH)
    early = replace(REDUCE_SCATTERS, microbatches=Microbatches.ALL_BUT_LAST)
    trial.holds(replace(training, plan=plan), *FREED, Nothing(select=early), *PARITY)


def _training(layout: Layout, script: HoldingBack, reshard: Reshard = Reshard.AFTER_FORWARD) -> Training:
    return train(
        CHAIN,
        layout=layout,
        grouping=Grouping.REQUIRED,
        reshard=Reshard.NATIVE if layout is Layout.REPLICATE else reshard,
        microbatches=NUM_MICROBATCHES,
        script=script,
    )
