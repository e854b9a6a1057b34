"""In backward the next gather goes before the reduction, also of joint units, recomputed ones and several backwards."""

from __future__ import annotations

from typing import Any

import pytest

from shardproof import SEVERAL, BranchByBranch, Capability
from shardproof import GathersGoFirst, Problem, Reshard, SumOfForwards, Trial
from shardproof.fixtures.chain import CHAIN, CHECKPOINTED_CHAIN, FORKED_CHAIN
from shardproof.fixtures.heads import FORK
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train_sharded
from shardproof.suites.vocabulary import PARITY

pytestmark = [pytest.mark.worlds(SEVERAL), pytest.mark.rows("C13", "C17")]

PAIRED: dict[str, Any] = {"units": ("blocks.0,blocks.1", "blocks.2,blocks.3")}
SUM = {"microbatches": 2, "script": SumOfForwards()}


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


@pytest.mark.kills("FreesJointUnitsByModule")
def test_each_backward_through_a_graph_gathers_a_joint_unit_once(trial: Trial) -> None:
    script, demands = BranchByBranch(branches=(0, 1)), frozenset({Capability.UNIT_STATE})
    trial.holds(train_sharded(FORKED_CHAIN, script=script, demands=demands, **PAIRED), *PARITY)
