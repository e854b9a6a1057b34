"""Layouts that the plan insists on: replicated, sharded, both on a 2-D mesh; had or refused, never ignored."""

from __future__ import annotations

from operator import attrgetter

import pytest

from engine.contract import Layout, Plan, Reshard
from fixtures.optimizers import ADAMW, SGD
from fixtures.problems import MLP_EVEN, MLP_UNEVEN
from harness.case import NamedOptimizer, Problem, Training
from harness.holdings import HoldsItsShare
from harness.ledger.agreement import RanksAgree
from harness.parity import MatchesOracle
from harness.pytest_plugin import Trial
from harness.worlds.sizes import EVEN

name = attrgetter("name")
LAWS = (MatchesOracle(), HoldsItsShare(), RanksAgree())


@pytest.mark.parametrize("problem", [MLP_EVEN, MLP_UNEVEN], ids=name)
@pytest.mark.parametrize("layout", [Layout.REPLICATE, Layout.SHARD], ids=lambda x: x.name.lower())
def test_trains_the_same_model(trial: Trial, layout: Layout, problem: Problem) -> None:
    plan = Plan(layout=layout, units=problem.units)
    trial.holds(Training(problem=problem, optimizer=SGD, plan=plan), *LAWS)


@pytest.mark.parametrize("reshard", [Reshard.AFTER_FORWARD, Reshard.KEEP], ids=lambda x: x.name.lower())
def test_reshards_as_asked_and_trains_the_same_model(trial: Trial, reshard: Reshard) -> None:
    plan = Plan(layout=Layout.SHARD, units=MLP_UNEVEN.units, reshard=reshard)
    trial.holds(Training(problem=MLP_UNEVEN, optimizer=SGD, plan=plan), *LAWS)


@pytest.mark.worlds(EVEN)
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=name)
@pytest.mark.parametrize("problem", [MLP_EVEN, MLP_UNEVEN], ids=name)
def test_trains_the_same_model_on_two_replicas(
    trial: Trial, problem: Problem, optimizer: NamedOptimizer
) -> None:
    plan = Plan(layout=Layout.HYBRID, units=problem.units)
    trial.holds(Training(problem=problem, optimizer=optimizer, plan=plan), *LAWS)
