"""Integers that each dtype holds one by one: what is added must lose nothing that the dtype of the sum can hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardproof import FOUR_OR_MORE_EVEN, POWERS_OF_TWO, SEVERAL, Accumulation, Capability, Dtype, Holding
from shardproof import HoldingBack, Layout, MatchesOracle, Offload, Op, Phase, Plan, Problem, RanksAgree
from shardproof import Schedule, Select, Training, Trial, Window
from shardproof.fixtures.optimizers import EXACT_SGD
from shardproof.fixtures.precision import EXACT_LATE, EXACT_OVERFLOW, EXACT_SMALL, EXACT_WIDE
from shardproof.suites.params import param
from shardproof.suites.vocabulary import PARITY

pytestmark = pytest.mark.worlds(POWERS_OF_TWO)

# One step: the next one's parameters would need more bits than forward has.
REDUCTIONS = Select(ops=(Op.ALL_REDUCE, Op.REDUCE_SCATTER), phases=(Phase.BACKWARD,), window=Window.TRAINING)


def _training(problem: Problem, plan: Plan, microbatches: int = 1) -> Training:
    schedule = Schedule(steps=1, microbatches=microbatches)
    return Training(problem=problem, optimizer=EXACT_SGD, plan=plan, schedule=schedule)


@pytest.mark.rows("C02")
@pytest.mark.kills("ReducesInBfloat16")
@pytest.mark.worlds(SEVERAL)
def test_reduces_in_float32_without_a_loss(trial: Trial) -> None:
    plan = Plan(units=EXACT_WIDE.units, reduce_dtype=torch.float32)
    reduces_as_asked = Dtype(select=REDUCTIONS, dtype="float32")
    trial.holds(_training(EXACT_WIDE, plan), MatchesOracle(), reduces_as_asked, RanksAgree())


@pytest.mark.rows("C03")
@pytest.mark.kills("DividesFloat16AfterTheSum", "ReducesInBfloat16")
@pytest.mark.worlds(SEVERAL)
def test_reduces_in_float16_without_overflow(trial: Trial) -> None:
    plan = Plan(units=EXACT_OVERFLOW.units, reduce_dtype=torch.float16)
    reduces_as_asked = Dtype(select=REDUCTIONS, dtype="float16")
    trial.holds(_training(EXACT_OVERFLOW, plan), MatchesOracle(), reduces_as_asked, RanksAgree())


@pytest.mark.rows("C08")
@pytest.mark.kills("AccumulatesInBfloat16", "KeepsNoMasterWeights")
@pytest.mark.parametrize("offload", [Offload.NONE, Offload.CPU], ids=["device", "host"])
def test_accumulates_in_the_dtype_of_the_reduction(trial: Trial, offload: Offload) -> None:
    plan = Plan(
        offload=offload,
        units=EXACT_WIDE.units,
        compute_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        accumulation=Accumulation.LAST_MICROBATCH,
    )
    trial.holds(_training(EXACT_WIDE, plan, microbatches=4), *PARITY)


@pytest.mark.rows("C04")
@pytest.mark.kills("RoundsWhereDtypesAreMixed", "AccumulatesInBfloat16")
def test_reduces_fresh_and_accumulated_gradients_together(trial: Trial) -> None:
    plan = Plan(
        compute_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        accumulation=Accumulation.LAST_MICROBATCH,
        demands=frozenset({Capability.UNUSED}),
    )
    trial.holds(_training(EXACT_LATE, plan, microbatches=4), *PARITY)


@pytest.mark.rows("T30")
@pytest.mark.kills("SumsReplicasInTheReduceDtype")
@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
def test_small_microbatches_count_where_the_all_reduce_waits(trial: Trial) -> None:
    script = HoldingBack(units=EXACT_SMALL.units, holding=Holding.REPLICAS)
    plan = Plan(
        layout=Layout.HYBRID, units=EXACT_SMALL.units, reduce_dtype=torch.bfloat16, demands=script.demands
    )
    training = replace(_training(EXACT_SMALL, plan, microbatches=4), script=script)
    trial.holds(training, *PARITY)


@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
@pytest.mark.parametrize(
    "layout",
    [
        param(Layout.HYBRID, kills="NeverSynchronisesReplicas"),
        param(Layout.REPLICATE, kills="HalvesTheLastRank"),
    ],
)
def test_a_parameter_that_is_used_late_counts_where_the_all_reduce_waits(
    trial: Trial, layout: Layout
) -> None:
    script = HoldingBack(units=("",), holding=Holding.REPLICAS)
    plan = Plan(layout=layout, demands=script.demands | {Capability.UNUSED})
    trial.holds(replace(_training(EXACT_LATE, plan, microbatches=4), script=script), *PARITY)
