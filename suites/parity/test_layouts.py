"""Layouts that the plan insists on: replicated, sharded, both on a 2-D mesh; had or refused, never ignored."""

from __future__ import annotations

import pytest

from shardproof import (
    EVEN,
    SEVERAL,
    SIX_OR_MORE_EVEN,
    Accumulation,
    Between,
    Count,
    HoldsItsShare,
    Layout,
    MatchesOracle,
    NamedOptimizer,
    Nothing,
    Op,
    Phase,
    Plan,
    RanksAgree,
    Replicas,
    Reshard,
    Schedule,
    Select,
    Training,
    Trial,
)
from shardproof.fixtures.optimizers import ADAMW, SGD
from shardproof.fixtures.problems import MLP_UNEVEN

LAWS = (MatchesOracle(), HoldsItsShare(), RanksAgree())
GATHERS_IN_BACKWARD = Select(ops=(Op.ALL_GATHER,), phases=(Phase.BACKWARD,))
# How an engine groups parameters is its own affair here: one gather for all, or one for each.
AT_MOST = len(list(MLP_UNEVEN.build().parameters()))
# One axis of the mesh has a single rank, or neither has; on one rank both have.
OTHER_REPLICAS = [
    pytest.param(Replicas.ONE, id="one", marks=pytest.mark.kills("DividesOneReplicaTwice")),
    pytest.param(
        Replicas.SINGLES,
        id="singles",
        marks=[
            pytest.mark.worlds(SEVERAL),
            pytest.mark.kills("NeverSynchronisesSingles", "AcceptsEveryPlan"),
        ],
    ),
    pytest.param(
        Replicas.PAIRS,
        id="pairs",
        marks=[pytest.mark.worlds(SIX_OR_MORE_EVEN), pytest.mark.kills("NeverSynchronisesReplicas")],
    ),
]


@pytest.mark.rows("T08", "R06")
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            Layout.REPLICATE, id="replicate", marks=pytest.mark.kills("ForgetsToSynchroniseOneParameter")
        ),
        pytest.param(
            Layout.SHARD,
            id="shard",
            marks=pytest.mark.kills("ReplicatesInsteadOfSharding", "CallsTheWholeItsChunks"),
        ),
    ],
)
def test_trains_the_same_model(trial: Trial, layout: Layout) -> None:
    plan = Plan(layout=layout, units=MLP_UNEVEN.units)
    trial.holds(_training(plan, SGD, 3), *LAWS)


@pytest.mark.rows("T09")
@pytest.mark.kills("KeepsWhatItWasAskedToFree")
@pytest.mark.worlds(SEVERAL)
def test_frees_after_forward_as_asked(trial: Trial) -> None:
    plan = Plan(layout=Layout.SHARD, units=MLP_UNEVEN.units, reshard=Reshard.AFTER_FORWARD)
    gathers_again = Count(select=GATHERS_IN_BACKWARD, expected=Between(1, AT_MOST))
    trial.holds(_training(plan, SGD, 3), *LAWS, gathers_again)


@pytest.mark.rows("T09")
@pytest.mark.kills("FreesWhatItWasAskedToKeep")
@pytest.mark.worlds(SEVERAL)
def test_keeps_until_backward_as_asked(trial: Trial) -> None:
    plan = Plan(layout=Layout.SHARD, units=MLP_UNEVEN.units, reshard=Reshard.KEEP)
    trial.holds(_training(plan, SGD, 3), *LAWS, Nothing(select=GATHERS_IN_BACKWARD))


@pytest.mark.rows("T35")
@pytest.mark.kills("NeverSynchronisesReplicas", "AcceptsEveryPlan")
@pytest.mark.worlds(EVEN)
@pytest.mark.parametrize(
    ("optimizer", "microbatches"),
    [
        pytest.param(SGD, 1, id="sgd-m1"),
        pytest.param(ADAMW, 3, id="adamw-m3", marks=pytest.mark.kills("LosesMicrobatchesOfReplicas")),
    ],
)
def test_trains_the_same_model_on_two_replicas(
    trial: Trial, optimizer: NamedOptimizer, microbatches: int
) -> None:
    plan = Plan(layout=Layout.HYBRID, units=MLP_UNEVEN.units)
    trial.holds(_training(plan, optimizer, microbatches), *LAWS)


@pytest.mark.rows("T35")
@pytest.mark.parametrize("replicas", OTHER_REPLICAS)
def test_trains_the_same_model_on_other_replicas(trial: Trial, replicas: Replicas) -> None:
    plan = Plan(layout=Layout.HYBRID, replicas=replicas, units=MLP_UNEVEN.units)
    trial.holds(_training(plan, SGD, 3), *LAWS)


@pytest.mark.rows("T35")
@pytest.mark.parametrize("replicas", OTHER_REPLICAS)
def test_accumulates_on_other_replicas(trial: Trial, replicas: Replicas) -> None:
    plan = Plan(
        layout=Layout.HYBRID,
        replicas=replicas,
        units=MLP_UNEVEN.units,
        accumulation=Accumulation.LAST_MICROBATCH,
    )
    trial.holds(_training(plan, SGD, 3), *LAWS)


def _training(plan: Plan, optimizer: NamedOptimizer, microbatches: int) -> Training:
    schedule = Schedule(microbatches=microbatches)
    return Training(problem=MLP_UNEVEN, optimizer=optimizer, plan=plan, schedule=schedule)
