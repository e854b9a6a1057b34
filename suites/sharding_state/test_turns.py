"""A unit is whole while it computes, and no longer; and in backward the next gather goes before the reduction.

Both are laws of any training: what is right at each event follows from plan and events. Here they hold where engines
lose track: groups of several modules, nested and recomputed units, a unit used twice, several forwards before one
backward, several backwards of one forward.
"""

from __future__ import annotations

from typing import Any

import pytest

from shardproof import SEVERAL, Accumulation, AllForwardsFirst, Backwards, BranchByBranch, Capability
from shardproof import GathersGoFirst, Problem, Reshard, SumOfForwards, Trial, Watch, WholeInTurn
from shardproof.fixtures.chain import CHAIN, CHECKPOINTED_CHAIN, LOOPED_CHAIN, NESTED_CHAIN
from shardproof.fixtures.heads import FORK
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train_sharded
from shardproof.suites.vocabulary import PARITY

pytestmark = [pytest.mark.worlds(SEVERAL), pytest.mark.rows("C13", "C17")]

JOINT = {"units": ("blocks.0", "blocks.1,blocks.2", "blocks.3")}
PAIRED = {"units": ("blocks.0,blocks.1", "blocks.2,blocks.3")}
SUM = {"microbatches": 2, "script": SumOfForwards()}
FORWARDS_FIRST = {"microbatches": 2, "script": AllForwardsFirst(backwards=Backwards.ONE_BY_ONE)}
HELD_BACK = {"microbatches": 3, "accumulation": Accumulation.LAST_MICROBATCH}
KEEPING = "KeepsUnitsForEarlierForwards"
KEPT = {"reshard": Reshard.KEEP}


@parametrize(
    "problem, asked",
    param(CHAIN, {}, id="freed", kills="KeepsUnitsUntilBackwardEnds"),
    param(CHAIN, KEPT, id="kept", kills="LeaksAfterBackward"),
    param(CHAIN, JOINT, id="joint", kills="KeepsUnitsUntilBackwardEnds"),
    param(CHAIN, SUM, id="sum", kills=KEEPING),
    param(CHAIN, {**JOINT, **SUM}, id="joint-sum", kills=KEEPING),
    param(CHAIN, FORWARDS_FIRST, id="forwards_first", kills="KeepsUnitsUntilBackwardEnds"),
    param(CHAIN, HELD_BACK, id="held_back", kills="KeepsUnitsUntilBackwardEnds"),
    param(CHECKPOINTED_CHAIN, SUM, id="checkpointed-sum", kills=KEEPING),
    param(NESTED_CHAIN, {}, id="nested", kills="KeepsUnitsUntilBackwardEnds"),
    param(LOOPED_CHAIN, {}, id="looped", kills="KeepsUnitsUntilBackwardEnds"),
)
def test_units_are_whole_in_their_turn(trial: Trial, problem: Problem, asked: dict[str, Any]) -> None:
    watch = frozenset({Watch.UNITS})
    asked = {"reshard": Reshard.AFTER_FORWARD, **asked}
    trial.holds(train_sharded(problem, watch=watch, **asked), WholeInTurn(), *PARITY)


@parametrize(
    "problem, asked",
    param(CHAIN, PAIRED, id="joint", kills="JointUnitsPrefetchNothing"),
    param(CHAIN, {**PAIRED, **SUM}, id="joint-sum", kills="JointUnitsPrefetchNothing"),
    param(CHECKPOINTED_CHAIN, PAIRED, id="checkpointed-joint", kills="JointUnitsPrefetchNothing"),
    param(
        FORK,
        {"script": BranchByBranch(branches=(1, 0))},
        id="two_backwards",
        kills="PrefetchesInTheFirstBackwardAlone",
    ),
)
def test_the_next_gather_goes_first(trial: Trial, problem: Problem, asked: dict[str, Any]) -> None:
    """For engines that gather ahead on request, which do so by themselves in backward."""
    demands = frozenset({Capability.PREFETCH})
    training = train_sharded(problem, reshard=Reshard.AFTER_FORWARD, demands=demands, **asked)
    trial.holds(training, GathersGoFirst(), *PARITY)
