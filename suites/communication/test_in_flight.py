"""No more reductions hold their input at once than the plan allows, and the limit does not change the trained model."""

from __future__ import annotations

import pytest

from shardproof import FOUR_OR_MORE_EVEN, SEVERAL, AllWaited, AtMostInFlight, Count, Exactly, Grouping, Layout
from shardproof import MatchesOracle, Refusal, Reshard, Training, Trial
from shardproof.fixtures.chain import CHAIN
from shardproof.suites.closed_forms import NUM_GROUPS
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY, REDUCE_SCATTERS


@pytest.mark.rows("C09", "C10")
@pytest.mark.kills("ReducesWithoutBound")
@pytest.mark.worlds(SEVERAL)
@parametrize(
    "layout, most",
    param(Layout.SHARD, 1, id="one"),
    param(Layout.SHARD, 3, id="three"),
    param(Layout.HYBRID, 2, id="hybrid-two", worlds=FOUR_OR_MORE_EVEN),
)
def test_no_more_reductions_are_in_flight_than_allowed(trial: Trial, layout: Layout, most: int) -> None:
    trial.holds(
        _training(layout, most),
        AtMostInFlight(select=REDUCE_SCATTERS, at_most=most),
        Count(select=REDUCE_SCATTERS, expected=Exactly(NUM_GROUPS)),
        AllWaited(select=REDUCE_SCATTERS),
        *PARITY,
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
