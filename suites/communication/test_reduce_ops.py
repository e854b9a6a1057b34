"""Where a plan asks for sums, nothing but sums crosses between ranks; who divides is then the engine's affair."""

from __future__ import annotations

import pytest

from shardproof import (
    FOUR_OR_MORE_EVEN,
    SEVERAL,
    Layout,
    MatchesOracle,
    Op,
    Phase,
    RanksAgree,
    ReduceOps,
    Select,
    Training,
    Trial,
    Wire,
)
from shardproof.fixtures.problems import MLP_UNEVEN
from shardproof.suites.training import train

SCATTERS = Select(ops=(Op.REDUCE_SCATTER,), phases=(Phase.BACKWARD,))
REDUCTIONS = Select(ops=(Op.ALL_REDUCE,), phases=(Phase.BACKWARD,))
ACROSS = Select(ops=(Op.ALL_REDUCE,), axis="replicate", phases=(Phase.BACKWARD,))


def _training(layout: Layout) -> Training:
    return train(MLP_UNEVEN, layout=layout, wire=Wire.SUM)


@pytest.mark.rows("C27")
@pytest.mark.kills("AveragesOnTheWire")
@pytest.mark.worlds(SEVERAL)
def test_shards_are_reduced_by_sums(trial: Trial) -> None:
    by_sums = ReduceOps(select=SCATTERS, allowed=("sum",))
    trial.holds(_training(Layout.SHARD), by_sums, MatchesOracle(), RanksAgree())


@pytest.mark.kills("AveragesOnTheWire")
@pytest.mark.worlds(SEVERAL)
def test_replicas_are_reduced_by_sums(trial: Trial) -> None:
    by_sums = ReduceOps(select=REDUCTIONS, allowed=("sum",))
    trial.holds(_training(Layout.REPLICATE), by_sums, MatchesOracle(), RanksAgree())


@pytest.mark.rows("C28")
@pytest.mark.kills("AveragesOnTheWire", "AveragesReplicasOnTheWire")
@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
def test_shards_of_replicas_are_reduced_by_sums_twice(trial: Trial) -> None:
    trial.holds(
        _training(Layout.HYBRID),
        ReduceOps(select=SCATTERS, allowed=("sum",)),
        ReduceOps(select=ACROSS, allowed=("sum",)),
        MatchesOracle(),
        RanksAgree(),
    )
