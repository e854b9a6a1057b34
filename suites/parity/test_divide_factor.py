"""Gradients are the sum over ranks divided by the factor that the plan names, in every layout that the engine has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.contract import Layout, Plan, Replicas
from fixtures.optimizers import SGD
from fixtures.problems import MLP_UNEVEN
from harness.case import Training
from harness.holdings import HoldsItsShare
from harness.ledger.agreement import RanksAgree
from harness.parity import MatchesOracle
from harness.pytest_plugin import Trial
from harness.worlds.sizes import FOUR_OR_MORE_EVEN, SEVERAL

LAWS = (MatchesOracle(), HoldsItsShare(), RanksAgree())
WORLD = None  # the number of ranks: what an engine divides by when nobody asks
# float64 beside float32: it is one of the dtypes in which engines divide partly before and partly after the sum.
DTYPES = [pytest.param(None, id="float32"), pytest.param(torch.float64, id="float64")]
FACTORS = [
    pytest.param(1, id="one"),
    pytest.param(2, id="two"),
    pytest.param(WORLD, id="world", marks=pytest.mark.worlds(SEVERAL)),
]
every_factor = pytest.mark.parametrize("factor", FACTORS)
both_dtypes = pytest.mark.parametrize("reduce_dtype", DTYPES)


@both_dtypes
@every_factor
@pytest.mark.parametrize("layout", [Layout.REPLICATE, Layout.SHARD], ids=lambda x: x.name.lower())
def test_divides_as_asked(
    trial: Trial, layout: Layout, factor: int | None, reduce_dtype: torch.dtype | None
) -> None:
    trial.holds(_training(Plan(layout=layout, reduce_dtype=reduce_dtype), factor or trial.world_size), *LAWS)


@both_dtypes
@every_factor
@pytest.mark.parametrize(
    "replicas",
    [
        pytest.param(Replicas.TWO, id="two", marks=pytest.mark.worlds(FOUR_OR_MORE_EVEN)),
        pytest.param(Replicas.SINGLES, id="singles", marks=pytest.mark.worlds(SEVERAL)),
    ],
)
def test_divides_as_asked_on_replicas(
    trial: Trial, replicas: Replicas, factor: int | None, reduce_dtype: torch.dtype | None
) -> None:
    plan = Plan(layout=Layout.HYBRID, replicas=replicas, reduce_dtype=reduce_dtype)
    trial.holds(_training(plan, factor or trial.world_size), *LAWS)


def _training(plan: Plan, factor: int) -> Training:
    # Several units: a factor that reaches the root alone does not reach them.
    plan = replace(plan, divide_factor=factor, units=MLP_UNEVEN.units)
    return Training(problem=MLP_UNEVEN, optimizer=SGD, plan=plan)
