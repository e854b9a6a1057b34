"""On a 2-D mesh each group is reduce-scattered within its replica and all-reduced across replicas."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

import pytest

from engine.contract import Grouping, Layout, Plan, Reshard
from fixtures.optimizers import SGD
from fixtures.problems import MLP_EVEN, MLP_UNEVEN
from harness.case import Problem, Training
from harness.ledger.agreement import RanksAgree
from harness.ledger.entry import Op, Phase
from harness.ledger.expectation import Exactly
from harness.ledger.laws import Count, OnlyThese
from harness.ledger.selection import Select
from harness.pytest_plugin import Trial
from harness.worlds.sizes import FOUR_OR_MORE_EVEN
from suites.communication.closed_forms import NUM_GROUPS

GATHERS = Select(ops=(Op.ALL_GATHER,), axis="shard")
SCATTERS = Select(ops=(Op.REDUCE_SCATTER,), axis="shard", phases=(Phase.BACKWARD,))
ACROSS = Select(ops=(Op.ALL_REDUCE,), axis="replicate", phases=(Phase.BACKWARD,))


@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
@pytest.mark.parametrize("problem", [MLP_EVEN, MLP_UNEVEN], ids=attrgetter("name"))
def test_reduces_within_and_across_replicas(trial: Trial, problem: Problem) -> None:
    plan = Plan(
        layout=Layout.HYBRID,
        units=problem.units,
        grouping=Grouping.REQUIRED,
        reshard=Reshard.AFTER_FORWARD,
    )
    trial.holds(
        Training(problem=problem, optimizer=SGD, plan=plan),
        Count(select=replace(GATHERS, phases=(Phase.FORWARD,)), expected=Exactly(NUM_GROUPS)),
        Count(select=replace(GATHERS, phases=(Phase.BACKWARD,)), expected=Exactly(NUM_GROUPS)),
        Count(select=SCATTERS, expected=Exactly(NUM_GROUPS)),
        Count(select=ACROSS, expected=Exactly(NUM_GROUPS)),
        OnlyThese(selects=(GATHERS, SCATTERS, ACROSS)),
        RanksAgree(),
    )
