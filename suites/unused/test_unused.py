"""A parameter that no loss reached has no gradient and does not move, on any rank; one that another rank used does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardproof import EVEN, SEVERAL, Accumulation, Capability, Layout, NamedOptimizer, Training, Trial
from shardproof.fixtures.idle import BORROWED, ROUTED, SOMETIMES
from shardproof.fixtures.optimizers import ADAMW, SGD
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY


@pytest.mark.kills("GivesZerosToUnusedParameters", "TakesTheFirstGraphForAll")
@parametrize("optimizer", SGD, ADAMW)
def test_leaves_unused_parameters_without_a_gradient(trial: Trial, optimizer: NamedOptimizer) -> None:
    """The side layer is unused in steps 2 and 3: after clearing to zeros momentum moves it, after None it rests."""
    training = train(SOMETIMES, optimizer, demands=frozenset({Capability.UNUSED}), steps=4)
    trial.holds(training, *PARITY)


@pytest.mark.worlds(SEVERAL)
@parametrize(
    "layout",
    param(Layout.NATIVE, kills="ReducesWhatEachRankUsed"),
    param(Layout.HYBRID, kills="ReducesWhatEachRankUsed", worlds=EVEN),
)
def test_reduces_what_only_some_ranks_used(trial: Trial, layout: Layout) -> None:
    trial.holds(_borrowed(layout=layout), *PARITY)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("ReducesWhatEachRankUsed")
@parametrize("dtype", torch.float64, torch.bfloat16)
def test_fills_up_in_the_dtype_of_the_reduction(trial: Trial, dtype: torch.dtype) -> None:
    trial.holds(_borrowed(reduce_dtype=dtype), *PARITY)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("ReducesWhatEachRankUsed")
def test_accumulates_what_only_some_ranks_used(trial: Trial) -> None:
    trial.holds(_borrowed(accumulation=Accumulation.LAST_MICROBATCH, microbatches=3), *PARITY)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("CallsUnitsThatOthersDoNot", "TakesTheFirstGraphForAll")
def test_trains_units_that_only_some_ranks_called(trial: Trial) -> None:
    demands = {Capability.UNUSED, Capability.RANK_DEPENDENT, Capability.RANK_DEPENDENT_UNITS}
    trial.holds(train(ROUTED, demands=frozenset(demands)), *PARITY)


# Any: as for `train`.
def _borrowed(**asked: Any) -> Training:
    return train(BORROWED, demands=frozenset({Capability.UNUSED, Capability.RANK_DEPENDENT}), **asked)
