"""backward_prefetch, forward_prefetch and limit_all_gathers: when units are gathered, and how many at a time.

A gather that forward issues early is issued during another unit's forward. In backward, blocks record when their
gradients are about to be computed: the next gather comes before that, or after it, or after the reduction.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardproof import SEVERAL, AtMostInFlight, BackwardGather, Computes, Count, Event, Exactly, Gathers
from shardproof import Grouping, Layout, Order, Plan, Problem, Reduces, Reshard, Training, Trial, Wrapper
from shardproof.fixtures.chain import CHAIN, TELLING_CHAIN
from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.problems import TRANSFORMER
from shardproof.suites.closed_forms import NUM_GROUPS
from shardproof.suites.params import param, parametrize
from shardproof.suites.vocabulary import GATHERS, GATHERS_IN_BACKWARD, IN_BACKWARD, IN_FORWARD, PARITY

pytestmark = pytest.mark.worlds(SEVERAL)

ROOT = ""
B0, B1, B2, B3 = CHAIN.units
BEGIN = (Gathers(ROOT), Gathers(B3))
END = (Computes(B0), Reduces(B0), Reduces(ROOT))
BEFORE = (
    *BEGIN,
    *(Gathers(B2), Computes(B3), Reduces(B3), Gathers(B1), Computes(B2), Reduces(B2)),
    *(Gathers(B0), Computes(B1), Reduces(B1)),
    *END,
)
AFTER = (
    *BEGIN,
    *(Computes(B3), Gathers(B2), Reduces(B3), Computes(B2), Gathers(B1), Reduces(B2)),
    *(Computes(B1), Gathers(B0), Reduces(B1)),
    *END,
)
WHEN_NEEDED = (
    *BEGIN,
    *(Computes(B3), Reduces(B3), Gathers(B2), Computes(B2), Reduces(B2), Gathers(B1)),
    *(Computes(B1), Reduces(B1), Gathers(B0)),
    *END,
)
IN_TURN = (Gathers(ROOT), Gathers(B0), Gathers(B1, B1), Gathers(B2, B2), Gathers(B3, B3))
AHEAD = (Gathers(ROOT), Gathers(B0), Gathers(B1, B0), Gathers(B2, B1), Gathers(B3, B2))


@pytest.mark.kills("SwapsBackwardPrefetch")
@pytest.mark.api("backward_prefetch", "BackwardPrefetch")
@parametrize(
    "gather, events",
    param(BackwardGather.BEFORE, BEFORE, id="before"),
    param(BackwardGather.AFTER, AFTER, id="after"),
    param(BackwardGather.WHEN_NEEDED, WHEN_NEEDED, id="when-needed"),
)
def test_backward_gathers_the_next_unit(
    trial: Trial, gather: BackwardGather, events: tuple[Event, ...]
) -> None:
    training = _training(TELLING_CHAIN, Wrapper(backward_prefetch=gather))
    trial.holds(training, Order(select=IN_BACKWARD, events=events), *PARITY)


@pytest.mark.kills("GathersWhatBackwardHasDone")
@pytest.mark.api("backward_prefetch")
def test_backward_gathers_nested_units_once(trial: Trial) -> None:
    nested = tuple(unit for block in TRANSFORMER.units for unit in (f"{block}.attention", block))
    training = _training(replace(TRANSFORMER, units=nested), Wrapper(backward_prefetch=BackwardGather.AFTER))
    trial.holds(training, Count(select=GATHERS_IN_BACKWARD, expected=Exactly(NUM_GROUPS)), *PARITY)


@pytest.mark.kills("InvertsForwardPrefetch")
@pytest.mark.api("forward_prefetch")
@parametrize("is_ahead, events", param(False, IN_TURN, id="in-turn"), param(True, AHEAD, id="ahead"))
def test_forward_gathers_the_next_unit(trial: Trial, is_ahead: bool, events: tuple[Event, ...]) -> None:
    training = _training(CHAIN, Wrapper(forward_prefetch=is_ahead))
    trial.holds(training, Order(select=IN_FORWARD, events=events), *PARITY)


@pytest.mark.kills("GathersAllUnitsAtOnce")
@pytest.mark.api("limit_all_gathers")
@parametrize("is_ahead", False, True, ids=["in-turn", "ahead"])
def test_no_more_than_two_gathers_are_in_flight(trial: Trial, is_ahead: bool) -> None:
    training = _training(CHAIN, Wrapper(limit_all_gathers=True, forward_prefetch=is_ahead))
    trial.holds(training, AtMostInFlight(select=GATHERS, at_most=2), *PARITY)


@pytest.mark.kills("DividesWrappedGradientsTwice")
@pytest.mark.api("limit_all_gathers")
def test_without_a_limit_trains_the_same_model(trial: Trial) -> None:
    trial.holds(_training(CHAIN, Wrapper(limit_all_gathers=False, forward_prefetch=True)), *PARITY)


def _training(problem: Problem, wrapper: Wrapper) -> Training:
    plan = Plan(
        layout=Layout.SHARD,
        units=problem.units,
        grouping=Grouping.REQUIRED,
        reshard=Reshard.AFTER_FORWARD,
        wrapper=wrapper,
    )
    return Training(problem=problem, optimizer=SGD, plan=plan)
