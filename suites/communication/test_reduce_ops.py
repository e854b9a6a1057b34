"""If a plan requires sums, ranks send only sums; where the engine divides is its own choice."""

from __future__ import annotations

import pytest

from shardproof import FOUR_OR_MORE_EVEN, SEVERAL, Layout, ReduceOps, Training, Trial, Wire
from shardproof.fixtures.problems import MLP_UNEVEN
from shardproof.suites.training import train
from shardproof.suites.vocabulary import ACROSS_REPLICAS, ALL_REDUCES, PARITY, REDUCE_SCATTERS

pytestmark = pytest.mark.worlds(SEVERAL)


def _training(layout: Layout) -> Training:
    return train(MLP_UNEVEN, layout=layout, wire=Wire.SUM)


@pytest.mark.rows("C27")
@pytest.mark.kills("AveragesOnTheWire")
def test_shards_are_reduced_by_sums(trial: Trial) -> None:
    by_sums = ReduceOps(select=REDUCE_SCATTERS, allowed=("sum",))
    trial.holds(_training(Layout.SHARD), by_sums, *PARITY)


@pytest.mark.kills("AveragesOnTheWire")
def test_replicas_are_reduced_by_sums(trial: Trial) -> None:
    by_sums = ReduceOps(select=ALL_REDUCES, allowed=("sum",))
    trial.holds(_training(Layout.REPLICATE), by_sums, *PARITY)


@pytest.mark.rows("C28")
@pytest.mark.kills("AveragesOnTheWire")
@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
def test_shards_of_replicas_are_reduced_by_sums_twice(trial: Trial) -> None:
    trial.holds(
        _training(Layout.HYBRID),
        ReduceOps(select=REDUCE_SCATTERS, allowed=("sum",)),
        ReduceOps(select=ACROSS_REPLICAS, allowed=("sum",)),
        *PARITY,
    )
