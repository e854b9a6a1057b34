"""No more reductions hold their input at once than the plan allows, and the bound changes nothing that is learnt."""

from __future__ import annotations

import pytest

from shardproof import (
    FOUR_OR_MORE_EVEN,
    SEVERAL,
    AllWaited,
    AtMostInFlight,
    Count,
    Exactly,
    Grouping,
    Layout,
    MatchesOracle,
    Op,
    Phase,
    RanksAgree,
    Refusal,
    Reshard,
    Select,
    Training,
    Trial,
)
from shardproof.fixtures.chain import CHAIN
from shardproof.suites.communication.closed_forms import NUM_GROUPS
from shardproof.suites.training import train

REDUCTIONS = Select(ops=(Op.REDUCE_SCATTER,), phases=(Phase.BACKWARD,))


@pytest.mark.rows("C09", "C10")
@pytest.mark.kills("ReducesWithoutBound")
@pytest.mark.worlds(SEVERAL)
@pytest.mark.parametrize(
    ("layout", "most"),
    [
        pytest.param(Layout.SHARD, 1, id="one"),
        pytest.param(Layout.SHARD, 3, id="three"),
        pytest.param(Layout.HYBRID, 2, id="hybrid-two", marks=pytest.mark.worlds(FOUR_OR_MORE_EVEN)),
    ],
)
def test_no_more_reductions_are_in_flight_than_allowed(trial: Trial, layout: Layout, most: int) -> None:
    trial.holds(
        _training(layout, most),
        AtMostInFlight(select=REDUCTIONS, at_most=most),
        Count(select=REDUCTIONS, expected=Exactly(NUM_GROUPS)),
        AllWaited(select=REDUCTIONS),
        MatchesOracle(),
        RanksAgree(),
    )


@pytest.mark.rows("C11")
@pytest.mark.kills("AcceptsNoReduceBuffers")
def test_a_bound_of_none_is_refused(trial: Trial) -> None:
    trial.holds(_training(Layout.SHARD, 0), MatchesOracle(), refusal=Refusal.REQUIRED)


def _training(layout: Layout, most: int) -> Training:
    return train(
        CHAIN,
        layout=layout,
        grouping=Grouping.REQUIRED,
        reshard=Reshard.AFTER_FORWARD,
        max_reduce_buffers=most,
    )
