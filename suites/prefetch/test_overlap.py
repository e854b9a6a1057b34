"""Collectives are in flight while units compute, and no further ahead than requested: the purpose of prefetching.

Calls, their order and the numbers are the same without it. The stream watch records when the stream on which units
compute waits for a collective, on a CPU as on a device. In a chain all overlap except at its two ends: nothing computes
before the first gathers are needed, and nothing after the last gradients are there.
"""

from __future__ import annotations

from typing import Any

import pytest

from shardproof import FOUR_OR_MORE_EVEN, SEVERAL, Between, Capability, Exactly, Layout, Overlaps, Phase
from shardproof import Prefetch, PrefetchDistance, Problem, Reshard, Training, Trial, Watch
from shardproof.fixtures.chain import CHAIN, CHECKPOINTED_CHAIN
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train_sharded
from shardproof.suites.vocabulary import ALL_REDUCES, GATHERS_IN_BACKWARD, GATHERS_IN_FORWARD, PARITY
from shardproof.suites.vocabulary import REDUCE_SCATTERS

pytestmark = pytest.mark.worlds(SEVERAL)

ROOT = ""
UNITS = CHAIN.units
FIRST, LAST = UNITS[0], UNITS[-1]
OVERLAPS_IN_FORWARD = Overlaps(select=GATHERS_IN_FORWARD, but_for=(ROOT, FIRST))
OVERLAPS_IN_BACKWARD = Overlaps(select=GATHERS_IN_BACKWARD, but_for=(ROOT, LAST))
SCATTERS = Overlaps(select=REDUCE_SCATTERS, but_for=(FIRST, ROOT))
# Across replicas the scattered result is reduced once more: a turn later, if the host waits for it.
REDUCTIONS = Overlaps(select=ALL_REDUCES, but_for=(UNITS[1], FIRST, ROOT))
of_waits = pytest.mark.kills("WaitsWhereItGathers")
of_lists = pytest.mark.kills("NeverPrefetches")


@of_waits
@of_lists
@pytest.mark.kills("PrefetchesOneTooFar", "GathersEverythingFirst")
@pytest.mark.rows("C14")
@parametrize("distance", 1, 2, ids=["one", "two"])
def test_forward_gathers_overlap_as_far_ahead_as_listed(trial: Trial, distance: int) -> None:
    training = _training(prefetch=Prefetch.by_distance(UNITS, forward=distance))
    ahead = PrefetchDistance(phase=Phase.FORWARD, units=Exactly(distance))
    trial.holds(training, OVERLAPS_IN_FORWARD, ahead, *PARITY)


@of_waits
@of_lists
@pytest.mark.kills("PrefetchesOneTooFar")
@pytest.mark.rows("C15")
@parametrize("distance", 1, 2, ids=["one", "two"])
def test_backward_gathers_overlap_as_far_ahead_as_listed(trial: Trial, distance: int) -> None:
    training = _training(prefetch=Prefetch.by_distance(UNITS, backward=distance))
    ahead = PrefetchDistance(phase=Phase.BACKWARD, units=Exactly(distance))
    trial.holds(training, OVERLAPS_IN_BACKWARD, ahead, *PARITY)


@of_waits
@pytest.mark.kills("PrefetchesAfterItsTurn")
@pytest.mark.rows("C13")
@parametrize(
    "problem, microbatches",
    param(CHAIN, 1, id="freed"),
    param(CHECKPOINTED_CHAIN, 1, id="checkpointed"),
    param(CHAIN, 2, id="microbatches"),
)
def test_backward_gathers_overlap_unasked(trial: Trial, problem: Problem, microbatches: int) -> None:
    ahead = PrefetchDistance(phase=Phase.BACKWARD, units=Exactly(1))
    trial.holds(_training(problem, microbatches=microbatches), OVERLAPS_IN_BACKWARD, ahead, *PARITY)


@pytest.mark.kills("GathersEverythingFirst")
def test_no_more_than_the_next_unit_is_gathered_unasked(trial: Trial) -> None:
    """An engine need not look ahead in forward by default; if it does, it must not fill the memory."""
    ahead = PrefetchDistance(phase=Phase.FORWARD, units=Between(0, 1))
    trial.holds(_training(), ahead, *PARITY)


@pytest.mark.kills("WaitsWhereItReduces", "ReducesInTheOrderOfForward")
@pytest.mark.rows("C13")
@parametrize(
    "layout, laws",
    param(Layout.SHARD, (SCATTERS,), id="shard"),
    param(Layout.HYBRID, (SCATTERS, REDUCTIONS), id="hybrid", worlds=FOUR_OR_MORE_EVEN),
)
def test_reductions_overlap_backward(trial: Trial, layout: Layout, laws: tuple[Overlaps, ...]) -> None:
    trial.holds(_training(layout=layout), *laws, *PARITY)


# Any: as for `train`.
def _training(problem: Problem = CHAIN, **asked: Any) -> Training:
    return train_sharded(
        problem,
        reshard=Reshard.AFTER_FORWARD,
        demands=frozenset({Capability.PREFETCH}),
        watch=frozenset({Watch.RACES}),
        **asked,
    )
