"""The inputs of forward reach the modules, and gradients propagate back."""

from __future__ import annotations

import pytest
import torch

from shardproof import SEVERAL, Layout, NestInputs, Reshard, Trial
from shardproof.fixtures.forward_inputs import NESTED_INPUTS, NO_INPUTS, PACKED, Bundle
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY


@parametrize("layout", param(Layout.SHARD, rows="T01"), param(Layout.REPLICATE, rows="R01"))
@pytest.mark.kills("DetachesNestedInputs")
def test_takes_nested_inputs(trial: Trial, layout: Layout) -> None:
    trial.holds(train(NESTED_INPUTS, layout=layout, script=NestInputs()), *PARITY)


@pytest.mark.rows("T01")
@pytest.mark.kills("CastsOuterInputsAlone")
def test_casts_nested_inputs(trial: Trial) -> None:
    trial.holds(
        train(NESTED_INPUTS, layout=Layout.SHARD, compute_dtype=torch.bfloat16, script=NestInputs()), *PARITY
    )


@pytest.mark.rows("X10")
@pytest.mark.kills("DetachesNestedInputs", "OverlooksDataclasses")
@parametrize("layout", Layout.SHARD, Layout.REPLICATE)
@parametrize("reshard", Reshard.NATIVE, Reshard.KEEP, ids=["native", "kept"])
def test_takes_and_returns_containers(trial: Trial, layout: Layout, reshard: Reshard) -> None:
    training = train(PACKED, layout=layout, reshard=reshard, steps=4, script=NestInputs(packs=Bundle))
    trial.holds(training, *PARITY)


@pytest.mark.kills("CastsOuterInputsAlone")
@parametrize("layout", Layout.SHARD, Layout.REPLICATE)
def test_casts_what_is_in_containers(trial: Trial, layout: Layout) -> None:
    training = train(PACKED, layout=layout, compute_dtype=torch.bfloat16, script=NestInputs(packs=Bundle))
    trial.holds(training, *PARITY)


@pytest.mark.rows("X10")
@pytest.mark.kills("OverlooksDataclasses")
@parametrize("reduce_dtype", torch.bfloat16, torch.float32)
@parametrize("layout", Layout.SHARD, Layout.REPLICATE)
def test_reduces_what_containers_led_to(trial: Trial, layout: Layout, reduce_dtype: torch.dtype) -> None:
    script = NestInputs(packs=Bundle)
    training = train(
        PACKED, layout=layout, compute_dtype=torch.bfloat16, reduce_dtype=reduce_dtype, script=script
    )
    trial.holds(training, *PARITY)


@pytest.mark.rows("T02")
@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("ReducesOnlyAfterInputs")
@parametrize("layout", Layout.SHARD, Layout.REPLICATE)
def test_takes_no_inputs(trial: Trial, layout: Layout) -> None:
    trial.holds(train(NO_INPUTS, layout=layout), *PARITY)
