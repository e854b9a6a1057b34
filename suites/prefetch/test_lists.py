"""Lists of units to prefetch decide which gathers start early, and their order; what is learnt stays the same.

A gather that forward asked for early is issued during another unit's forward. In backward it comes before the
reductions that it is to overlap.
"""

from __future__ import annotations

import pytest

from engine.contract import Grouping, Layout, Plan, Prefetch, Reshard
from fixtures.chain import CHAIN, CHECKPOINTED_CHAIN, NESTED_CHAIN
from fixtures.optimizers import SGD
from harness.case import Problem, Training
from harness.ledger.agreement import RanksAgree
from harness.ledger.entry import Phase
from harness.ledger.order import Event, Gathers, Order, Reduces
from harness.ledger.selection import Select
from harness.parity import MatchesOracle
from harness.pytest_plugin import Trial
from harness.worlds.sizes import SEVERAL

FORWARD = Select(phases=(Phase.FORWARD,))
BACKWARD = Select(phases=(Phase.BACKWARD,))
RIGHT = (MatchesOracle(), RanksAgree())
ROOT = ""
B0, B1, B2, B3 = UNITS = CHAIN.units
I0, N0, I1, N1, I2, N2 = NESTED_CHAIN.units
JOINT = ("blocks.0", "blocks.1,blocks.2", "blocks.3")

ONE_AHEAD = (Gathers(ROOT), Gathers(B0), Gathers(B1, B0), Gathers(B2, B1), Gathers(B3, B2))
TWO_AHEAD = (Gathers(ROOT), Gathers(B0), Gathers(B1, B0), Gathers(B2, B0), Gathers(B3, B1))
ONE_BEHIND = (
    *(Gathers(ROOT), Gathers(B3), Gathers(B2, B3), Reduces(B3), Gathers(B1, B2), Reduces(B2)),
    *(Gathers(B0, B1), Reduces(B1), Reduces(B0), Reduces(ROOT)),
)
TWO_BEHIND = (
    *(Gathers(ROOT), Gathers(B3), Gathers(B2, B3), Gathers(B1, B3), Reduces(B3)),
    *(Gathers(B0, B2), Reduces(B2), Reduces(B1), Reduces(B0), Reduces(ROOT)),
)
# The inner unit of the last block is on no list: the recomputation that needs it gathers it.
INSIDE_CHECKPOINTS = (
    *(
        Gathers(ROOT),
        Gathers(N2),
        Gathers(N1, N2),
        Gathers(I1, N2),
        Gathers(I2, I2),
        Reduces(I2),
        Reduces(N2),
    ),
    *(Gathers(N0, N1), Gathers(I0, N1), Reduces(I1), Reduces(N1), Reduces(I0), Reduces(N0), Reduces(ROOT)),
)
JOINTLY = (
    *(Gathers(ROOT), Gathers(JOINT[2]), Gathers(JOINT[1], B3), Reduces(JOINT[2])),
    *(Gathers(JOINT[0], B2), Reduces(JOINT[1]), Reduces(JOINT[0]), Reduces(ROOT)),
)


@pytest.mark.rows("C14")
@pytest.mark.worlds(SEVERAL)
@pytest.mark.parametrize(
    ("distance", "ahead"),
    [
        pytest.param(
            1,
            ONE_AHEAD,
            id="one",
            marks=pytest.mark.prey(
                "NeverPrefetches", "PrefetchesOneTooFar", "PrefetchesAgainInRecomputation"
            ),
        ),
        pytest.param(
            2,
            TWO_AHEAD,
            id="two",
            marks=pytest.mark.prey("NeverPrefetches", "PrefetchesOneTooFar", "SwapsPrefetchesOnTheLastRank"),
        ),
    ],
)
def test_forward_gathers_ahead_as_listed(trial: Trial, distance: int, ahead: tuple[Event, ...]) -> None:
    again = tuple(Gathers(unit) for unit in (ROOT, *reversed(UNITS)))
    trial.holds(
        _training(CHECKPOINTED_CHAIN, Prefetch.by_distance(UNITS, forward=distance)),
        Order(select=FORWARD, events=ahead),
        Order(select=BACKWARD, events=again),
        *RIGHT,
    )


@pytest.mark.rows("C15")
@pytest.mark.worlds(SEVERAL)
@pytest.mark.parametrize(
    ("distance", "behind"),
    [
        pytest.param(
            1,
            ONE_BEHIND,
            id="one",
            marks=pytest.mark.prey("NeverPrefetches", "PrefetchesOneTooFar", "KeepsMistakenPrefetches"),
        ),
        pytest.param(
            2,
            TWO_BEHIND,
            id="two",
            marks=pytest.mark.prey("NeverPrefetches", "PrefetchesOneTooFar", "SwapsPrefetchesOnTheLastRank"),
        ),
    ],
)
def test_backward_gathers_ahead_as_listed(trial: Trial, distance: int, behind: tuple[Event, ...]) -> None:
    trial.holds(
        _training(CHECKPOINTED_CHAIN, Prefetch.by_distance(UNITS, backward=distance)),
        Order(select=FORWARD, events=tuple(Gathers(unit) for unit in (ROOT, *UNITS))),
        Order(select=BACKWARD, events=behind),
        *RIGHT,
    )


@pytest.mark.rows("C16")
@pytest.mark.prey("NeverPrefetches", "SwapsPrefetchesOnTheLastRank")
@pytest.mark.worlds(SEVERAL)
def test_lists_hold_inside_checkpoints(trial: Trial) -> None:
    prefetch = Prefetch(backward=((N2, (N1, I1)), (N1, (N0, I0))))
    training = _training(NESTED_CHAIN, prefetch, NESTED_CHAIN.units)
    trial.holds(training, Order(select=BACKWARD, events=INSIDE_CHECKPOINTS), *RIGHT)


@pytest.mark.rows("C17")
@pytest.mark.prey("NeverPrefetches", "SplitsJointUnits")
@pytest.mark.worlds(SEVERAL)
def test_groups_of_several_modules_prefetch_like_one(trial: Trial) -> None:
    training = _training(CHAIN, Prefetch.by_distance(JOINT, backward=1), JOINT)
    trial.holds(
        training,
        Order(select=FORWARD, events=tuple(Gathers(unit) for unit in (ROOT, *JOINT))),
        Order(select=BACKWARD, events=JOINTLY),
        *RIGHT,
    )


@pytest.mark.rows("C19")
@pytest.mark.prey("KeepsMistakenPrefetches", "PrefetchesStaleParameters")
@pytest.mark.worlds(SEVERAL)
def test_a_wrong_hint_costs_no_correctness(trial: Trial) -> None:
    # When the first block's backward asks for the last one, that one's backward is over.
    trial.holds(_training(CHAIN, Prefetch(backward=((B0, (B3,)), (B3, (B0,))))), *RIGHT)


@pytest.mark.rows("T14", "R10")
@pytest.mark.prey("PrefetchesStaleParameters")
@pytest.mark.parametrize("layout", [Layout.SHARD, Layout.REPLICATE], ids=lambda x: x.name.lower())
def test_lists_change_nothing_that_is_learnt(trial: Trial, layout: Layout) -> None:
    prefetch = Prefetch.by_distance(UNITS, forward=2, backward=2)
    plan = Plan(layout=layout, units=UNITS, prefetch=prefetch)
    trial.holds(Training(problem=CHAIN, optimizer=SGD, plan=plan), *RIGHT)


def _training(problem: Problem, prefetch: Prefetch, units: tuple[str, ...] = UNITS) -> Training:
    plan = Plan(
        layout=Layout.SHARD,
        units=units,
        grouping=Grouping.REQUIRED,
        reshard=Reshard.AFTER_FORWARD,
        prefetch=prefetch,
    )
    return Training(problem=problem, optimizer=SGD, plan=plan)
