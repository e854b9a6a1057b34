"""Units are gathered in the order of their use and reduced in the reverse order, with any prefetching.

How far ahead an engine gathers by default is its own choice, so the orders of gathers and of reductions are checked
separately.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardproof import FOUR_OR_MORE_EVEN, SEVERAL, Capability, Event, Gathers, Layout, Microbatches, Nothing
from shardproof import Order, Phase, Problem, Reduces, Reshard, Reshards, Select, SumOfForwards, Together
from shardproof import Training, Trial, Watch
from shardproof.fixtures.chain import CHAIN, CHECKPOINTED_CHAIN, LOOPED_CHAIN
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train_sharded
from shardproof.suites.vocabulary import GATHERS, GATHERS_IN_BACKWARD, IN_BACKWARD, IN_FORWARD, PARITY

pytestmark = pytest.mark.worlds(SEVERAL)

INWARDS = ("", "blocks.0", "blocks.1", "blocks.2", "blocks.3")
OUTWARDS = ("blocks.3", "blocks.2", "blocks.1", "blocks.0", "")
GATHERED = Order(select=IN_FORWARD, events=tuple(map(Gathers, INWARDS)))
# Backward reaches the root first: its output is the root's.
GATHERED_AGAIN = Order(select=IN_BACKWARD, events=tuple(map(Gathers, ("", *OUTWARDS[:-1]))))
REDUCED = Order(select=IN_BACKWARD, events=tuple(map(Reduces, OUTWARDS)))
FREED = Order(select=IN_FORWARD, events=tuple(map(Reshards, (*INWARDS[1:], ""))))
FREED_BUT_ROOT = Order(select=IN_FORWARD, events=tuple(map(Reshards, INWARDS[1:])))
# The root's inputs need no gradient: it may be reduced when its gradients are there, and freed at the end.
ENDS = (
    *(event for unit in OUTWARDS[:-1] for event in (Reshards(unit), Reduces(unit))),
    Together(frozenset({Reshards(""), Reduces("")})),
)
# By default the next unit is gathered before the current one's gradients are computed.
OVERLAPPED: tuple[Event | Together, ...] = (
    *(Gathers("blocks.3"), Gathers("blocks.2"), *ENDS[:2], Gathers("blocks.1"), *ENDS[2:4]),
    *(Gathers("blocks.0"), *ENDS[4:]),
)
ALL_AGAIN = Order(select=IN_BACKWARD, events=(Gathers(""), *OVERLAPPED))
BLOCKS_AGAIN = Order(select=IN_BACKWARD, events=OVERLAPPED)
NONE_AGAIN = Order(
    select=Select(phases=(Phase.FORWARD, Phase.BACKWARD)), events=(*map(Gathers, INWARDS), *ENDS)
)


@pytest.mark.rows("C13", "T09")
@pytest.mark.kills("GathersTheLastUnitFirst", "ReducesInTheOrderOfForward", "ReadsTheGatherTooEarly")
@parametrize(
    "problem, reshard",
    param(CHAIN, Reshard.AFTER_FORWARD, id="freed"),
    param(CHECKPOINTED_CHAIN, Reshard.AFTER_FORWARD, id="checkpointed"),
    param(CHAIN, Reshard.TO_PAIRS, id="pairs", worlds=FOUR_OR_MORE_EVEN),
)
def test_gathers_as_used_and_again_in_reverse(trial: Trial, problem: Problem, reshard: Reshard) -> None:
    trial.holds(_training(problem, reshard=reshard), GATHERED, GATHERED_AGAIN, REDUCED, *PARITY)


@pytest.mark.rows("C13", "T09")
@pytest.mark.kills("GathersTheLastUnitFirst", "ReducesInTheOrderOfForward", "ReadsTheGatherTooEarly")
def test_gathers_kept_units_in_forward_alone(trial: Trial) -> None:
    training = _training(reshard=Reshard.KEEP)
    trial.holds(training, GATHERED, Nothing(select=GATHERS_IN_BACKWARD), REDUCED, *PARITY)


@pytest.mark.rows("C13")
@pytest.mark.kills("GathersTheLastUnitFirst", "ReducesInTheOrderOfForward")
@parametrize(
    "problem, reshard, orders",
    param(CHAIN, Reshard.AFTER_FORWARD, (FREED, ALL_AGAIN), id="freed", kills="PrefetchesAfterItsTurn"),
    param(CHECKPOINTED_CHAIN, Reshard.AFTER_FORWARD, (FREED, ALL_AGAIN), id="checkpointed"),
    param(CHAIN, Reshard.NATIVE, (FREED_BUT_ROOT, BLOCKS_AGAIN), id="root-kept"),
    param(CHAIN, Reshard.KEEP, (NONE_AGAIN,), id="kept"),
    param(CHAIN, Reshard.TO_PAIRS, (FREED, ALL_AGAIN), id="pairs", worlds=FOUR_OR_MORE_EVEN),
)
def test_a_step_goes_in_the_order_of_torch(
    trial: Trial, problem: Problem, reshard: Reshard, orders: tuple[Order, ...]
) -> None:
    """All of the first part of row C13, for engines that gather ahead on request.

    As seen from outside: a gather and a reduction by their issue, a free by the parameters in modules. An unshard or
    post-backward without effect is not counted. In forward an engine may prefetch, so gathers and frees have separate
    orders there.
    """
    prefetches, watch = frozenset({Capability.PREFETCH}), frozenset({Watch.UNITS})
    training = _training(problem, reshard=reshard, demands=prefetches, watch=watch)
    trial.holds(training, GATHERED, *orders, *PARITY)


@pytest.mark.rows("R06")
@pytest.mark.kills("ReducesInTheOrderOfForward")
def test_replicas_reduce_in_reverse(trial: Trial) -> None:
    training = _training(layout=Layout.REPLICATE, reshard=Reshard.NATIVE)
    trial.holds(training, REDUCED, Nothing(select=GATHERS), *PARITY)


@pytest.mark.rows("C13")
@pytest.mark.kills("ReducesInTheOrderOfForward", "ReadsTheGatherTooEarly")
def test_reduces_a_unit_used_twice_once(trial: Trial) -> None:
    trial.holds(_training(LOOPED_CHAIN), REDUCED, *PARITY)


@pytest.mark.rows("C13")
@pytest.mark.kills("ForgetsEarlierForwards", "GathersTheLastUnitFirst", "ReducesInTheOrderOfForward")
def test_two_forwards_and_one_backward_reduce_once(trial: Trial) -> None:
    training = _training(microbatches=2, script=SumOfForwards())
    of_last = replace(IN_BACKWARD, microbatches=Microbatches.LAST)
    trial.holds(training, GATHERED, replace(REDUCED, select=of_last), *PARITY)


# Any: as for `train`.
def _training(problem: Problem = CHAIN, **asked: Any) -> Training:
    return train_sharded(problem, **{"reshard": Reshard.AFTER_FORWARD, **asked})
