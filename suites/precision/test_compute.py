"""Forward and backward compute in the dtype asked for; masters, accumulation and reduction have dtypes of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardproof import EVEN, FOUR_OR_MORE_EVEN, OUTPUT_DTYPE, SEVERAL, Capability, Dtype, Grouping, Layout
from shardproof import LiesOnTheDimAskedFor, MatchesOracle, Notes, NotesForms, Op, Phase, Placement, Plan
from shardproof import Problem, RanksAgree, Schedule, Select, Training, Trial
from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.placements import DIVISIBLE_MLP
from shardproof.fixtures.precision import JOINT_CASTS
from shardproof.fixtures.problems import MLP_UNEVEN, TRANSFORMER
from shardproof.suites.vocabulary import ACROSS_REPLICAS, GATHERS, REDUCTIONS

LOW = Plan(compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _training(problem: Problem, plan: Plan, microbatches: int = 1) -> Training:
    return Training(
        problem=problem,
        optimizer=SGD,
        plan=replace(plan, units=problem.units),
        schedule=Schedule(microbatches=microbatches),
        script=NotesForms(),
    )


@pytest.mark.rows("C08")
@pytest.mark.kills(
    "HalvesOneUnit", "ForgetsMicrobatchesInLowPrecision", "IgnoresTheComputeDtype", "SumsInsteadOfAveraging"
)
@pytest.mark.worlds(SEVERAL)
@pytest.mark.parametrize("problem", [MLP_UNEVEN, TRANSFORMER])
def test_computes_in_bfloat16_and_reduces_in_float32(trial: Trial, problem: Problem) -> None:
    trial.holds(
        _training(problem, LOW, microbatches=3),
        MatchesOracle(),
        Notes(subject=OUTPUT_DTYPE, value="torch.bfloat16"),
        Dtype(select=REDUCTIONS, dtype="float32"),
        RanksAgree(),
    )


@pytest.mark.kills("IgnoresTheComputeDtype", "HalvesOneUnit", "ForgetsMicrobatchesInLowPrecision")
@pytest.mark.worlds(SEVERAL)
def test_gathers_and_reduces_in_the_compute_dtype_when_asked_for_nothing_else(trial: Trial) -> None:
    in_bfloat16 = Dtype(select=Select(phases=(Phase.FORWARD, Phase.BACKWARD)), dtype="bfloat16")
    plan = Plan(compute_dtype=torch.bfloat16, demands=frozenset({Capability.REDUCE_AS_COMPUTED}))
    trial.holds(
        _training(MLP_UNEVEN, plan, microbatches=3),
        MatchesOracle(),
        Notes(subject=OUTPUT_DTYPE, value="torch.bfloat16"),
        in_bfloat16,
        RanksAgree(),
    )


@pytest.mark.rows("T18")
@pytest.mark.kills("ReducesAsComputedUnasked")
@pytest.mark.worlds(SEVERAL)
@pytest.mark.parametrize("layout", [Layout.REPLICATE, Layout.SHARD])
def test_gathers_in_the_compute_dtype_and_reduces_as_stored_when_asked_for_nothing_else(
    trial: Trial, layout: Layout
) -> None:
    gathers = Select(ops=(Op.ALL_GATHER,), phases=(Phase.FORWARD, Phase.BACKWARD))
    plan = Plan(layout=layout, compute_dtype=torch.bfloat16, demands=frozenset({Capability.REDUCE_AS_STORED}))
    trial.holds(
        _training(MLP_UNEVEN, plan, microbatches=3),
        MatchesOracle(),
        Notes(subject=OUTPUT_DTYPE, value="torch.bfloat16"),
        Dtype(select=REDUCTIONS, dtype="float32"),
        *([Dtype(select=gathers, dtype="bfloat16")] if layout is Layout.SHARD else []),
        RanksAgree(),
    )


@pytest.mark.worlds(EVEN)
@pytest.mark.kills("ShardsTheFirstDim")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_computes_in_few_bits_along_the_largest_dim(trial: Trial, dtype: torch.dtype) -> None:
    plan = replace(LOW, layout=Layout.SHARD, placement=Placement.LARGEST, compute_dtype=dtype)
    crossing = Dtype(select=GATHERS, dtype=str(dtype).partition(".")[2])
    trial.holds(_training(DIVISIBLE_MLP, plan), MatchesOracle(), LiesOnTheDimAskedFor(), crossing)


@pytest.mark.kills("ReturnsTheComputeDtype")
def test_returns_the_dtype_asked_for(trial: Trial) -> None:
    plan = replace(LOW, output_dtype=torch.float32)
    trial.holds(
        _training(MLP_UNEVEN, plan), MatchesOracle(), Notes(subject=OUTPUT_DTYPE, value="torch.float32")
    )


@pytest.mark.rows("T18")
@pytest.mark.kills("CastsInputsOfTheFirstModuleAlone")
def test_casts_the_inputs_of_each_module_of_a_group(trial: Trial) -> None:
    plan = replace(LOW, grouping=Grouping.REQUIRED)
    trial.holds(
        _training(JOINT_CASTS, plan), MatchesOracle(), Notes(subject=OUTPUT_DTYPE, value="torch.bfloat16")
    )


@pytest.mark.kills("ReducesReplicasInBfloat16")
@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
def test_reduces_across_replicas_in_float32_too(trial: Trial) -> None:
    plan = replace(LOW, layout=Layout.HYBRID)
    across = ACROSS_REPLICAS
    within = Select(ops=(Op.REDUCE_SCATTER,), axis="shard", phases=(Phase.BACKWARD,))
    trial.holds(
        _training(MLP_UNEVEN, plan),
        MatchesOracle(),
        Dtype(select=across, dtype="float32"),
        Dtype(select=within, dtype="float32"),
        RanksAgree(),
    )
