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
from harness.worlds.sizes import ALONE, FOUR_OR_MORE_EVEN, SEVERAL

LAWS = (MatchesOracle(), HoldsItsShare(), RanksAgree())
WORLD = None  # the number of ranks: what an engine divides by when nobody asks
# float64 beside float32: it is one of the dtypes in which engines divide partly before and partly after the sum.
DTYPES = [pytest.param(None, id="float32"), pytest.param(torch.float64, id="float64")]
FACTORS = [
    pytest.param(1, id="one", marks=pytest.mark.prey("AveragesWhateverTheFactor")),
    pytest.param(2, id="two", marks=pytest.mark.prey("DividesByTheSquareOfTheFactor")),
    pytest.param(
        WORLD,
        id="world",
        marks=[pytest.mark.worlds(SEVERAL), pytest.mark.prey("DividesByTheSquareOfTheFactor")],
    ),
]
TWO = pytest.mark.worlds(FOUR_OR_MORE_EVEN)
SINGLES = pytest.mark.worlds(SEVERAL)
FACTORS_OF_REPLICAS = [
    pytest.param(Replicas.TWO, 1, id="two-one", marks=[TWO, pytest.mark.prey("IgnoresTheDivideFactor")]),
    pytest.param(Replicas.TWO, 2, id="two-two", marks=[TWO, pytest.mark.prey("DividesByTheFactorTwice")]),
    pytest.param(
        Replicas.TWO, WORLD, id="two-world", marks=[TWO, pytest.mark.prey("DividesByTheFactorTwice")]
    ),
    pytest.param(
        Replicas.SINGLES,
        1,
        id="singles-one",
        marks=[SINGLES, pytest.mark.prey("IgnoresTheDivideFactorOfSingles")],
    ),
    pytest.param(
        Replicas.SINGLES, 2, id="singles-two", marks=[SINGLES, pytest.mark.prey("DividesByTheFactorTwice")]
    ),
    pytest.param(
        Replicas.SINGLES,
        WORLD,
        id="singles-world",
        marks=[SINGLES, pytest.mark.prey("DividesByTheFactorTwice")],
    ),
]
every_factor = pytest.mark.parametrize("factor", FACTORS)
both_dtypes = pytest.mark.parametrize("reduce_dtype", DTYPES)


@pytest.mark.rows("C08")
@both_dtypes
@every_factor
@pytest.mark.parametrize("layout", [Layout.REPLICATE, Layout.SHARD], ids=lambda x: x.name.lower())
def test_divides_as_asked(
    trial: Trial, layout: Layout, factor: int | None, reduce_dtype: torch.dtype | None
) -> None:
    trial.holds(_training(Plan(layout=layout, reduce_dtype=reduce_dtype), factor or trial.world_size), *LAWS)


@pytest.mark.rows("C08")
@both_dtypes
@pytest.mark.parametrize(("replicas", "factor"), FACTORS_OF_REPLICAS)
def test_divides_as_asked_on_replicas(
    trial: Trial, replicas: Replicas, factor: int | None, reduce_dtype: torch.dtype | None
) -> None:
    plan = Plan(layout=Layout.HYBRID, replicas=replicas, reduce_dtype=reduce_dtype)
    trial.holds(_training(plan, factor or trial.world_size), *LAWS)


@pytest.mark.rows("C08")
@pytest.mark.prey("AveragesWhateverTheFactor")
@pytest.mark.worlds(SEVERAL)
def test_divides_as_asked_what_bfloat16_computed(trial: Trial) -> None:
    plan = Plan(compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    trial.holds(_training(plan, 1), MatchesOracle(), RanksAgree())


@pytest.mark.rows("C29")
@pytest.mark.prey("HalvesOneUnit")
@pytest.mark.worlds(ALONE)
@pytest.mark.parametrize(
    "factor",
    [
        pytest.param(None, id="none"),
        pytest.param(1, id="one"),
        pytest.param(2, id="two", marks=pytest.mark.prey("IgnoresTheDivideFactorOfOneRank")),
    ],
)
def test_one_rank_divides_by_the_factor_alone(trial: Trial, factor: int | None) -> None:
    trial.holds(_training(Plan(layout=Layout.SHARD), factor), *LAWS)


def _training(plan: Plan, factor: int | None) -> Training:
    # Several units: a factor that reaches the root alone does not reach them.
    plan = replace(plan, divide_factor=factor, units=MLP_UNEVEN.units)
    return Training(problem=MLP_UNEVEN, optimizer=SGD, plan=plan)
