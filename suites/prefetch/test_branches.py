"""A backward through one branch of the model: units gathered ahead for the other branch are mistaken prefetches.

The third part of row C13: a trunk, two heads, and for each head's loss a backward of its own through the graph of one
forward. An engine that follows forward's order in reverse goes from the right head to the left one, which this backward
never enters; a caller may request that too. Only an early or unnecessary gather shows the mistake: the unit is not
reduced before its turn, is not gathered again for it, and is gathered anew in the next step's forward. An engine that
makes no mistake, without a request for prefetching, is right too.
"""

from __future__ import annotations

import pytest

from shardproof import SEVERAL, Between, Bound, BranchByBranch, Count, Exactly, Gathers, Order, Prefetch
from shardproof import Reduces, Reshard, Reshards, Together, Training, Trial, Watch
from shardproof.fixtures.heads import FORK
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train_sharded
from shardproof.suites.vocabulary import GATHERS_IN_BACKWARD, IN_BACKWARD, IN_FORWARD, PARITY

pytestmark = [pytest.mark.worlds(SEVERAL), pytest.mark.rows("C13")]

TRUNK, LEFT, RIGHT = FORK.units
LEFT_FIRST, RIGHT_FIRST = BranchByBranch(branches=(0, 1)), BranchByBranch(branches=(1, 0))
GATHERED_ANEW = Order(select=IN_FORWARD, events=tuple(map(Gathers, FORK.units)))
# The trunk's inputs need no gradient: it may be reduced when its gradients are there, and freed at the end.
TRUNK_ENDS = Together(frozenset({Reshards(TRUNK), Reduces(TRUNK)}))


@parametrize(
    "script, reduced, gathers",
    param(
        RIGHT_FIRST,
        (RIGHT, TRUNK, LEFT, TRUNK),
        Exactly(4),
        id="used-later",
        kills="GathersMistakenPrefetchesAgain",
    ),
    param(
        LEFT_FIRST,
        (LEFT, TRUNK, RIGHT, TRUNK),
        Between(4, 5),
        id="never-used",
        kills="TakesUnusedPrefetchesAsCurrent",
    ),
)
def test_a_wrong_guess_costs_one_gather_at_most(
    trial: Trial, script: BranchByBranch, reduced: tuple[str, ...], gathers: Bound
) -> None:
    trial.holds(
        _training(script),
        GATHERED_ANEW,
        Order(select=IN_BACKWARD, events=tuple(map(Reduces, reduced))),
        Count(select=GATHERS_IN_BACKWARD, expected=gathers),
        *PARITY,
    )


@pytest.mark.kills("GathersMistakenPrefetchesAgain", "NeverPrefetches")
def test_a_unit_pointed_at_by_mistake_waits_for_its_turn(trial: Trial) -> None:
    backward = (
        *(Gathers(RIGHT), Gathers(LEFT, RIGHT), Reshards(RIGHT), Reduces(RIGHT), Gathers(TRUNK), TRUNK_ENDS),
        *(Gathers(TRUNK, LEFT), Reshards(LEFT), Reduces(LEFT), TRUNK_ENDS),
    )
    trial.holds(
        _training(RIGHT_FIRST, Prefetch(backward=((RIGHT, (LEFT,)), (LEFT, (TRUNK,))))),
        GATHERED_ANEW,
        Order(select=IN_BACKWARD, events=backward),
        *PARITY,
    )


def _training(script: BranchByBranch, prefetch: Prefetch | None = None) -> Training:
    return train_sharded(
        FORK, reshard=Reshard.AFTER_FORWARD, prefetch=prefetch, script=script, watch=frozenset({Watch.UNITS})
    )
