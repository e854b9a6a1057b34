"""Collectives are in flight while units compute, and no further ahead than asked: what prefetching is for.

Calls, their order and the numbers are the same without it. The watch over streams tells when the stream on which
units compute waits for a collective, on a CPU as on a device. Of a chain all overlap but for its two ends: nothing
computes before the first gathers are needed, and nothing after the last gradients are there.
"""

from __future__ import annotations

import pytest

from shardproof import FOUR_OR_MORE_EVEN, SEVERAL, Between, Capability, Exactly, Grouping, Layout, Op
from shardproof import Overlaps, Phase, Plan, Prefetch, PrefetchDistance, Problem, Reshard, Schedule, Select
from shardproof import Training, Trial, Watch
from shardproof.fixtures.chain import CHAIN, CHECKPOINTED_CHAIN
from shardproof.fixtures.optimizers import SGD
from shardproof.suites.params import param
from shardproof.suites.vocabulary import ALL_REDUCES, PARITY, REDUCE_SCATTERS

pytestmark = pytest.mark.worlds(SEVERAL)

ROOT = ""
UNITS = CHAIN.units
FIRST, LAST = UNITS[0], UNITS[-1]
GATHERS_IN_FORWARD = Overlaps(
    select=Select(ops=(Op.ALL_GATHER,), phases=(Phase.FORWARD,)), but_for=(ROOT, FIRST)
)
GATHERS_IN_BACKWARD = Overlaps(
    select=Select(ops=(Op.ALL_GATHER,), phases=(Phase.BACKWARD,)), but_for=(ROOT, LAST)
)
SCATTERS = Overlaps(select=REDUCE_SCATTERS, but_for=(FIRST, ROOT))
# Across replicas what was scattered is reduced once more: a turn later, where waiting for it is up to the host.
REDUCTIONS = Overlaps(select=ALL_REDUCES, but_for=(UNITS[1], FIRST, ROOT))
of_waits = pytest.mark.kills("WaitsForEachGather", "WaitsWhereItGathers")
of_lists = pytest.mark.kills("NeverPrefetches", "PrefetchesOneTooFew", "PrefetchesTheUnitAfterNext")
# There the watch has yet to be seen at work; `--thorough` asks for it.
not_on_cuda = pytest.mark.device("!cuda")


@not_on_cuda
@of_waits
@of_lists
@pytest.mark.kills("PrefetchesOneTooFar", "GathersEverythingFirst")
@pytest.mark.rows("C14")
@pytest.mark.parametrize("distance", [1, 2], ids=["one", "two"])
def test_forward_gathers_overlap_as_far_ahead_as_listed(trial: Trial, distance: int) -> None:
    plan = _plan(prefetch=Prefetch.by_distance(UNITS, forward=distance))
    ahead = PrefetchDistance(phase=Phase.FORWARD, units=Exactly(distance))
    trial.holds(_training(plan), GATHERS_IN_FORWARD, ahead, *PARITY)


@not_on_cuda
@of_waits
@of_lists
@pytest.mark.kills("PrefetchesOneTooFar")
@pytest.mark.rows("C15")
@pytest.mark.parametrize("distance", [1, 2], ids=["one", "two"])
def test_backward_gathers_overlap_as_far_ahead_as_listed(trial: Trial, distance: int) -> None:
    plan = _plan(prefetch=Prefetch.by_distance(UNITS, backward=distance))
    ahead = PrefetchDistance(phase=Phase.BACKWARD, units=Exactly(distance))
    trial.holds(_training(plan), GATHERS_IN_BACKWARD, ahead, *PARITY)


@not_on_cuda
@of_waits
@pytest.mark.kills("PrefetchesAfterItsTurn")
@pytest.mark.rows("C13")
@pytest.mark.parametrize(
    ("problem", "schedule"),
    [
        pytest.param(CHAIN, Schedule(), id="freed"),
        pytest.param(CHECKPOINTED_CHAIN, Schedule(), id="checkpointed"),
        pytest.param(CHAIN, Schedule(microbatches=2), id="microbatches"),
    ],
)
def test_backward_gathers_overlap_unasked(trial: Trial, problem: Problem, schedule: Schedule) -> None:
    ahead = PrefetchDistance(phase=Phase.BACKWARD, units=Exactly(1))
    trial.holds(_training(_plan(), problem, schedule), GATHERS_IN_BACKWARD, ahead, *PARITY)


@not_on_cuda
@pytest.mark.kills("GathersEverythingFirst")
def test_no_more_than_the_next_unit_is_gathered_unasked(trial: Trial) -> None:
    """An engine need not look ahead in forward by itself; where it does, it is not to fill the memory."""
    ahead = PrefetchDistance(phase=Phase.FORWARD, units=Between(0, 1))
    trial.holds(_training(_plan()), ahead, *PARITY)


@not_on_cuda
@pytest.mark.kills("WaitsForEachReduction", "WaitsWhereItReduces", "ReducesInTheOrderOfForward")
@pytest.mark.rows("C13")
@pytest.mark.parametrize(
    ("layout", "laws"),
    [
        pytest.param(Layout.SHARD, (SCATTERS,), id="shard"),
        param(Layout.HYBRID, (SCATTERS, REDUCTIONS), id="hybrid", worlds=FOUR_OR_MORE_EVEN),
    ],
)
def test_reductions_overlap_backward(trial: Trial, layout: Layout, laws: tuple[Overlaps, ...]) -> None:
    trial.holds(_training(_plan(layout)), *laws, *PARITY)


def _plan(layout: Layout = Layout.SHARD, prefetch: Prefetch | None = None) -> Plan:
    return Plan(
        layout=layout,
        units=UNITS,
        grouping=Grouping.REQUIRED,
        reshard=Reshard.AFTER_FORWARD,
        prefetch=prefetch,
        demands=frozenset({Capability.PREFETCH}),
    )


def _training(plan: Plan, problem: Problem = CHAIN, schedule: Schedule | None = None) -> Training:
    return Training(
        problem=problem,
        optimizer=SGD,
        plan=plan,
        schedule=schedule or Schedule(),
        watch=frozenset({Watch.RACES}),
    )
