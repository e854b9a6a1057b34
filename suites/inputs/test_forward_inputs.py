"""Whatever forward is called with reaches the modules, and gradients find the way back."""

from __future__ import annotations

import pytest
import torch

from shardproof import SEVERAL, Layout, MatchesOracle, NestInputs, RanksAgree, Reshard, Trial
from shardproof.fixtures.forward_inputs import NESTED_INPUTS, NO_INPUTS, PACKED, Bundle
from shardproof.suites.training import train


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout.SHARD, id="shard", marks=pytest.mark.rows("T01")),
        pytest.param(Layout.REPLICATE, id="replicate", marks=pytest.mark.rows("R01")),
    ],
)
@pytest.mark.kills("DetachesNestedInputs")
def test_takes_nested_inputs(trial: Trial, layout: Layout) -> None:
    trial.holds(train(NESTED_INPUTS, layout=layout, script=NestInputs()), MatchesOracle(), RanksAgree())


@pytest.mark.rows("T01")
@pytest.mark.kills("CastsOuterInputsAlone")
def test_casts_nested_inputs(trial: Trial) -> None:
    trial.holds(
        train(NESTED_INPUTS, layout=Layout.SHARD, compute_dtype=torch.bfloat16, script=NestInputs()),
        MatchesOracle(),
        RanksAgree(),
    )


@pytest.mark.kills("DetachesNestedInputs")
@pytest.mark.parametrize("layout", [Layout.SHARD, Layout.REPLICATE], ids=lambda x: x.name.lower())
@pytest.mark.parametrize("reshard", [Reshard.NATIVE, Reshard.KEEP], ids=["native", "kept"])
def test_takes_and_returns_containers(trial: Trial, layout: Layout, reshard: Reshard) -> None:
    training = train(PACKED, layout=layout, reshard=reshard, steps=4, script=NestInputs(packs=Bundle))
    trial.holds(training, MatchesOracle(), RanksAgree())


@pytest.mark.kills("CastsOuterInputsAlone")
@pytest.mark.parametrize("layout", [Layout.SHARD, Layout.REPLICATE], ids=lambda x: x.name.lower())
def test_casts_what_is_in_containers(trial: Trial, layout: Layout) -> None:
    training = train(PACKED, layout=layout, compute_dtype=torch.bfloat16, script=NestInputs(packs=Bundle))
    trial.holds(training, MatchesOracle(), RanksAgree())


@pytest.mark.rows("T02")
@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("ReducesOnlyAfterInputs")
@pytest.mark.parametrize("layout", [Layout.SHARD, Layout.REPLICATE], ids=lambda x: x.name.lower())
def test_takes_no_inputs(trial: Trial, layout: Layout) -> None:
    trial.holds(train(NO_INPUTS, layout=layout), MatchesOracle(), RanksAgree())
