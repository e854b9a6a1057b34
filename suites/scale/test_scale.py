"""Closed forms on a sample of the ranks of a large world, which has no data to compare."""

from __future__ import annotations

import pytest

from shardproof import SIMULATED, Between, Bytes, Count, Exactly, FewCalls, Layout, Nothing, OnlyThese, Op
from shardproof import Phase, Problem, Reshard, Select, Training, Trial, groups_of
from shardproof.fixtures.optimizers import ADAMW
from shardproof.fixtures.problems import MLP_EVEN, TRANSFORMER
from shardproof.suites.closed_forms import GRADIENT_BYTES, NUM_GROUPS, PADDED_BYTES, ClosedForm
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train, train_sharded
from shardproof.suites.vocabulary import GATHERS_IN_BACKWARD, GATHERS_IN_FORWARD, REDUCE_SCATTERS

pytestmark = pytest.mark.worlds(SIMULATED)

PROBLEMS = [MLP_EVEN, TRANSFORMER]
REDUCTIONS = Select(ops=(Op.ALL_REDUCE,), phases=(Phase.BACKWARD,), dtypes=("float32",))


def _num_calls(training: Training, world_size: int) -> int:
    """Allow four calls for each parameter and each group of parameters, in preparation and in each step."""
    num_parameters = sum(len(group.shapes) for group in groups_of(training))
    return 4 * (num_parameters + len(groups_of(training))) * (1 + training.schedule.steps)


MOST_CALLS = FewCalls(
    at_most=ClosedForm(name="4 for each parameter and group, once and per step", formula=_num_calls)
)


# A rank's rows of the smaller model have as many bytes as a thousand numbers of each unit.
KEEPS = pytest.mark.kills("KeepsANumberForEachRank", world="simulated:1024")


@pytest.mark.kills("BroadcastsFromEachRank", world="simulated:1024")
@parametrize("problem", MLP_EVEN, param(TRANSFORMER, marks=KEEPS))
def test_sharding_costs_no_more_for_more_ranks(trial: Trial, problem: Problem) -> None:
    trial.holds(
        train_sharded(problem, ADAMW, reshard=Reshard.AFTER_FORWARD),
        Count(select=GATHERS_IN_FORWARD, expected=Exactly(NUM_GROUPS)),
        Count(select=GATHERS_IN_BACKWARD, expected=Exactly(NUM_GROUPS)),
        Count(select=REDUCE_SCATTERS, expected=Exactly(NUM_GROUPS)),
        Bytes(select=REDUCE_SCATTERS, expected=Between(GRADIENT_BYTES, PADDED_BYTES), minimum=GRADIENT_BYTES),
        OnlyThese(selects=(GATHERS_IN_FORWARD, GATHERS_IN_BACKWARD, REDUCE_SCATTERS)),
        MOST_CALLS,
    )


@pytest.mark.kills("BroadcastsFromEachRank", world="simulated:1024")
@parametrize("problem", *PROBLEMS)
def test_replication_costs_no_more_for_more_ranks(trial: Trial, problem: Problem) -> None:
    trial.holds(
        train(problem, ADAMW, layout=Layout.REPLICATE),
        Bytes(select=REDUCTIONS, expected=Exactly(GRADIENT_BYTES), minimum=GRADIENT_BYTES),
        Nothing(select=Select(ops=(Op.ALL_GATHER, Op.REDUCE_SCATTER))),
        MOST_CALLS,
    )
