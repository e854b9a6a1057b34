"""A parameter that no loss reached has no gradient and does not move, on any rank; one that another rank used does."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

import pytest
import torch

from shardproof import (
    EVEN,
    SEVERAL,
    Accumulation,
    Capability,
    Dtype,
    Layout,
    MatchesOracle,
    NamedOptimizer,
    Op,
    Phase,
    Plan,
    RanksAgree,
    Schedule,
    Select,
    Training,
    Trial,
)
from shardproof.fixtures.idle import BORROWED, SOMETIMES
from shardproof.fixtures.optimizers import ADAMW, SGD
from shardproof.suites.training import train

REDUCTIONS = Select(ops=(Op.ALL_REDUCE, Op.REDUCE_SCATTER), phases=(Phase.BACKWARD,))
LAWS = (MatchesOracle(), RanksAgree())


@pytest.mark.kills("GivesZerosToUnusedParameters", "TakesTheFirstGraphForAll")
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=attrgetter("name"))
def test_leaves_unused_parameters_without_a_gradient(trial: Trial, optimizer: NamedOptimizer) -> None:
    """The side layer goes unused in steps 2 and 3: after clearing to zeros it coasts on, after None it rests."""
    training = train(SOMETIMES, optimizer, demands=frozenset({Capability.UNUSED}), steps=4)
    trial.holds(training, *LAWS)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout.NATIVE, id="native", marks=pytest.mark.kills("ReducesWhatEachRankUsed")),
        pytest.param(
            Layout.HYBRID,
            id="hybrid",
            marks=[pytest.mark.kills("ReducesWhatEachRankUsed"), pytest.mark.worlds(EVEN)],
        ),
    ],
)
def test_reduces_what_only_some_ranks_used(trial: Trial, layout: Layout) -> None:
    trial.holds(_borrowed(Plan(layout=layout)), *LAWS)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("ReducesWhatEachRankUsed")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_fills_up_in_the_dtype_of_the_reduction(trial: Trial, dtype: torch.dtype) -> None:
    training = _borrowed(Plan(reduce_dtype=dtype))
    crossing = Dtype(select=REDUCTIONS, dtype=str(dtype).partition(".")[2])
    trial.holds(training, *LAWS, crossing)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("ReducesWhatEachRankUsed")
def test_accumulates_what_only_some_ranks_used(trial: Trial) -> None:
    trial.holds(_borrowed(Plan(accumulation=Accumulation.LAST_MICROBATCH), microbatches=3), *LAWS)


def _borrowed(plan: Plan, *, microbatches: int = 1) -> Training:
    demands = frozenset({Capability.UNUSED, Capability.RANK_DEPENDENT})
    plan = replace(plan, units=BORROWED.units, demands=demands)
    return Training(problem=BORROWED, optimizer=SGD, plan=plan, schedule=Schedule(microbatches=microbatches))
