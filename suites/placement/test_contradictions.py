"""Options that exclude each other are refused by every rank: otherwise one of them would be ignored."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardproof import ODD, SEVERAL, Capability, Grouping, Law, Layout, LiesOnTheDimAskedFor, MatchesOracle
from shardproof import Placement, Plan, Problem, Refusal, Reshard, Training, Trial
from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.placements import DIVISIBLE_MLP
from shardproof.fixtures.problems import MLP_UNEVEN
from shardproof.fixtures.refused import BY_COLUMNS, LISTED, UNLIKE
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train

REQUIRED = Plan(layout=Layout.SHARD, grouping=Grouping.REQUIRED)
kills = pytest.mark.kills
ALONE = kills("RefusesUnitsOnTheFirstRankAlone")

CONTRADICTIONS = [
    # A replicated parameter is sharded along no dim, and not freed.
    param(Plan(layout=Layout.REPLICATE, placement=Placement.LARGEST), id="dim_of_replicas"),
    param(Plan(layout=Layout.REPLICATE, reshard=Reshard.AFTER_FORWARD), id="freed_replicas"),
    param(Plan(layout=Layout.SHARD, reshard=Reshard.TO_PAIRS), id="pairs_of_odd_ranks", worlds=ODD),
]


@pytest.mark.rows("C24")
@pytest.mark.kills("DropsWhatTheLayoutExcludes")
@parametrize("plan", *CONTRADICTIONS)
def test_refuses_options_that_exclude_each_other(trial: Trial, plan: Plan) -> None:
    training = Training(problem=DIVISIBLE_MLP, optimizer=SGD, plan=plan)
    trial.holds(training, MatchesOracle(), refusal=Refusal.REQUIRED)


@pytest.mark.worlds(SEVERAL)
@parametrize(
    "problem, plan, laws",
    param(BY_COLUMNS, REQUIRED, (), id="columns", kills="ReadsColumnsAsRows"),
    param(LISTED, replace(REQUIRED, units=("layers.0", "layers.0")), (), id="twice", marks=ALONE),
    param(LISTED, replace(REQUIRED, units=("layers",)), (), id="no_forward", marks=ALONE),
    param(
        MLP_UNEVEN,
        replace(REQUIRED, placement=Placement.LARGEST),
        (LiesOnTheDimAskedFor(),),
        id="uneven_dim",
        kills="ShardsTheFirstDim",
    ),
)
def test_shards_right_or_refuses(trial: Trial, problem: Problem, plan: Plan, laws: tuple[Law, ...]) -> None:
    training = Training(problem=problem, optimizer=SGD, plan=plan)
    trial.holds(training, MatchesOracle(), *laws, refusal=Refusal.ALLOWED)


@pytest.mark.kills("SkipsTheComparisonOfRanks")
@pytest.mark.worlds(SEVERAL)
@parametrize("problem", *UNLIKE)
def test_refuses_models_that_differ_between_ranks(trial: Trial, problem: Problem) -> None:
    training = train(problem, demands=frozenset({Capability.COMPARES_RANKS}))
    trial.holds(training, MatchesOracle(), refusal=Refusal.REQUIRED)
