"""Required layouts: replicated, sharded, both on a 2-D mesh; supported or refused, never ignored."""

from __future__ import annotations

import pytest

from shardproof import EVEN, SEVERAL, SIX_OR_MORE_EVEN, Accumulation, Between, Count, HoldsItsShare, Layout
from shardproof import MatchesOracle, NamedOptimizer, Nothing, RanksAgree, Replicas, Reshard, Trial
from shardproof.fixtures.optimizers import ADAMW, SGD
from shardproof.fixtures.problems import MLP_UNEVEN
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import GATHERS_IN_BACKWARD

LAWS = (MatchesOracle(), HoldsItsShare(), RanksAgree())
# How an engine groups parameters is its own choice here: one gather for all, or one for each.
AT_MOST = len(list(MLP_UNEVEN.build().parameters()))
# One axis of the mesh has a single rank, or neither has; on one rank both have.
OTHER_REPLICAS = [
    param(Replicas.ONE, kills="DividesOneReplicaTwice"),
    param(Replicas.SINGLES, kills=("NeverSynchronisesSingles", "AcceptsEveryPlan"), worlds=SEVERAL),
    param(Replicas.PAIRS, kills="NeverSynchronisesReplicas", worlds=SIX_OR_MORE_EVEN),
]


@pytest.mark.rows("T08", "R06")
@parametrize(
    "layout",
    param(Layout.REPLICATE, kills="ForgetsToSynchroniseOneParameter"),
    param(Layout.SHARD, kills=("ReplicatesInsteadOfSharding", "CallsTheWholeItsChunks")),
)
def test_trains_the_same_model(trial: Trial, layout: Layout) -> None:
    trial.holds(train(MLP_UNEVEN, layout=layout, microbatches=3), *LAWS)


@pytest.mark.rows("T09")
@pytest.mark.kills("KeepsWhatItWasAskedToFree")
@pytest.mark.worlds(SEVERAL)
def test_frees_after_forward_as_asked(trial: Trial) -> None:
    training = train(MLP_UNEVEN, layout=Layout.SHARD, reshard=Reshard.AFTER_FORWARD, microbatches=3)
    trial.holds(training, *LAWS, Count(select=GATHERS_IN_BACKWARD, expected=Between(1, AT_MOST)))


@pytest.mark.rows("T09")
@pytest.mark.kills("FreesWhatItWasAskedToKeep")
@pytest.mark.worlds(SEVERAL)
def test_keeps_until_backward_as_asked(trial: Trial) -> None:
    training = train(MLP_UNEVEN, layout=Layout.SHARD, reshard=Reshard.KEEP, microbatches=3)
    trial.holds(training, *LAWS, Nothing(select=GATHERS_IN_BACKWARD))


@pytest.mark.rows("T35")
@pytest.mark.kills("NeverSynchronisesReplicas", "AcceptsEveryPlan")
@pytest.mark.worlds(EVEN)
@parametrize(
    "optimizer, microbatches",
    param(SGD, 1, id="sgd-m1"),
    param(ADAMW, 3, id="adamw-m3"),
)
def test_trains_the_same_model_on_two_replicas(
    trial: Trial, optimizer: NamedOptimizer, microbatches: int
) -> None:
    trial.holds(train(MLP_UNEVEN, optimizer, layout=Layout.HYBRID, microbatches=microbatches), *LAWS)


@pytest.mark.rows("T35")
@parametrize("replicas", *OTHER_REPLICAS)
def test_trains_the_same_model_on_other_replicas(trial: Trial, replicas: Replicas) -> None:
    trial.holds(train(MLP_UNEVEN, layout=Layout.HYBRID, replicas=replicas, microbatches=3), *LAWS)


@pytest.mark.rows("T35")
@parametrize("replicas", *OTHER_REPLICAS)
def test_accumulates_on_other_replicas(trial: Trial, replicas: Replicas) -> None:
    accumulation = Accumulation.LAST_MICROBATCH
    trial.holds(
        train(MLP_UNEVEN, layout=Layout.HYBRID, replicas=replicas, accumulation=accumulation, microbatches=3),
        *LAWS,
    )
