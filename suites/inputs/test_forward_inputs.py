"""Whatever forward is called with reaches the modules, and gradients find the way back."""

from __future__ import annotations

import pytest
import torch

from fixtures.forward_inputs import NESTED_INPUTS, NO_INPUTS
from fixtures.optimizers import SGD
from shardproof import SEVERAL, Layout, MatchesOracle, NestInputs, Plan, RanksAgree, Training, Trial


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout.SHARD, id="shard", marks=pytest.mark.rows("T01")),
        pytest.param(Layout.REPLICATE, id="replicate", marks=pytest.mark.rows("R01")),
    ],
)
@pytest.mark.kills("DetachesNestedInputs")
def test_takes_nested_inputs(trial: Trial, layout: Layout) -> None:
    plan = Plan(layout=layout, units=NESTED_INPUTS.units)
    trial.holds(
        Training(problem=NESTED_INPUTS, optimizer=SGD, plan=plan, script=NestInputs()),
        MatchesOracle(),
        RanksAgree(),
    )


@pytest.mark.rows("T01")
@pytest.mark.kills("CastsOuterInputsAlone")
def test_casts_nested_inputs(trial: Trial) -> None:
    plan = Plan(layout=Layout.SHARD, units=NESTED_INPUTS.units, compute_dtype=torch.bfloat16)
    trial.holds(
        Training(problem=NESTED_INPUTS, optimizer=SGD, plan=plan, script=NestInputs()),
        MatchesOracle(),
        RanksAgree(),
    )


@pytest.mark.rows("T02")
@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("ReducesOnlyAfterInputs")
@pytest.mark.parametrize("layout", [Layout.SHARD, Layout.REPLICATE], ids=lambda x: x.name.lower())
def test_takes_no_inputs(trial: Trial, layout: Layout) -> None:
    plan = Plan(layout=layout, units=NO_INPUTS.units)
    trial.holds(Training(problem=NO_INPUTS, optimizer=SGD, plan=plan), MatchesOracle(), RanksAgree())
