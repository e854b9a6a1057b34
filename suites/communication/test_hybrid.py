"""On a 2-D mesh each group is reduce-scattered within its replica and all-reduced across replicas.

If an axis of the mesh has one rank, its collectives are optional: they cross nothing.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardproof import FOUR_OR_MORE_EVEN, SEVERAL, AllWaited, Bytes, Count, Exactly
from shardproof import Grouping, Layout, OnlyThese, Op, Phase, Problem, RanksAgree, Replicas, Reshard, Select
from shardproof import Training, Trial
from shardproof.fixtures.problems import MLP_EVEN, MLP_UNEVEN
from shardproof.suites.closed_forms import GRADIENT_BYTES, NUM_GROUPS
from shardproof.suites.params import parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import ACROSS_REPLICAS

pytestmark = pytest.mark.worlds(SEVERAL)

GATHERS = Select(ops=(Op.ALL_GATHER,), axis="shard")
SCATTERS = Select(ops=(Op.REDUCE_SCATTER,), axis="shard", phases=(Phase.BACKWARD,))
ALONE = Select(group_size=1)
ONCE_PER_GROUP = Exactly(NUM_GROUPS)
WITHIN_REPLICAS = (
    Count(select=replace(GATHERS, phases=(Phase.FORWARD,)), expected=ONCE_PER_GROUP),
    Count(select=replace(GATHERS, phases=(Phase.BACKWARD,)), expected=ONCE_PER_GROUP),
    Count(select=SCATTERS, expected=ONCE_PER_GROUP),
)
every_problem = parametrize("problem", MLP_EVEN, MLP_UNEVEN)


@pytest.mark.rows("T35")
@pytest.mark.kills("NeverSynchronisesReplicas", "ShardsOverReplicas")
@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
@every_problem
def test_reduces_within_and_across_replicas(trial: Trial, problem: Problem) -> None:
    trial.holds(
        _training(problem, Replicas.TWO),
        *WITHIN_REPLICAS,
        Count(select=ACROSS_REPLICAS, expected=ONCE_PER_GROUP),
        OnlyThese(selects=(GATHERS, SCATTERS, ACROSS_REPLICAS)),
        RanksAgree(),
    )


@pytest.mark.kills("NeverSynchronisesSingles", "TransposesTheMesh")
@every_problem
def test_single_ranks_reduce_across_replicas(trial: Trial, problem: Problem) -> None:
    trial.holds(
        _training(problem, Replicas.SINGLES),
        Count(select=ACROSS_REPLICAS, expected=ONCE_PER_GROUP),
        Bytes(select=ACROSS_REPLICAS, expected=Exactly(GRADIENT_BYTES), minimum=GRADIENT_BYTES),
        AllWaited(select=ACROSS_REPLICAS),
        OnlyThese(selects=(ACROSS_REPLICAS, ALONE)),
        RanksAgree(),
    )


def _training(problem: Problem, replicas: Replicas) -> Training:
    return train(
        problem,
        layout=Layout.HYBRID,
        replicas=replicas,
        grouping=Grouping.REQUIRED,
        reshard=Reshard.AFTER_FORWARD,
    )
