"""Forward and backward compute in the planned dtype; masters, accumulation and reduction have dtypes of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardproof import EVEN, FOUR_OR_MORE_EVEN, OUTPUT_DTYPE, SEVERAL, Capability, Dtype, Grouping, Layout
from shardproof import LiesOnTheDimAskedFor, MatchesOracle, Notes, NotesForms, Op, Phase, Placement, Problem
from shardproof import RanksAgree, Select, Training, Trial
from shardproof.fixtures.placements import DIVISIBLE_MLP
from shardproof.fixtures.precision import JOINT_CASTS
from shardproof.fixtures.problems import MLP_EVEN, MLP_UNEVEN, TRANSFORMER
from shardproof.suites.params import parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import GATHERS, IN_BACKWARD, PARITY, REDUCTIONS

RETURNS_BFLOAT16 = Notes(subject=OUTPUT_DTYPE, value="torch.bfloat16")


# Any: as for `train`.
def _training(problem: Problem, reduce_dtype: torch.dtype | None = torch.float32, **asked: Any) -> Training:
    low = {"compute_dtype": torch.bfloat16, "reduce_dtype": reduce_dtype, "script": NotesForms()}
    return train(problem, **{**low, **asked})


@pytest.mark.rows("C08")
@pytest.mark.kills("HalvesOneUnit", "IgnoresTheComputeDtype", "SumsInsteadOfAveraging")
@pytest.mark.worlds(SEVERAL)
@parametrize("problem", MLP_UNEVEN, TRANSFORMER)
def test_computes_in_bfloat16_and_reduces_in_float32(trial: Trial, problem: Problem) -> None:
    trial.holds(_training(problem, microbatches=3), RETURNS_BFLOAT16, *PARITY)


@pytest.mark.kills("IgnoresTheComputeDtype", "HalvesOneUnit")
@pytest.mark.worlds(SEVERAL)
def test_gathers_and_reduces_in_the_compute_dtype_when_asked_for_nothing_else(trial: Trial) -> None:
    in_bfloat16 = Dtype(select=Select(phases=(Phase.FORWARD, Phase.BACKWARD)), dtype="bfloat16")
    as_computed = frozenset({Capability.REDUCE_AS_COMPUTED})
    trial.holds(
        _training(MLP_UNEVEN, None, demands=as_computed, microbatches=3),
        MatchesOracle(),
        RETURNS_BFLOAT16,
        in_bfloat16,
        RanksAgree(),
    )


@pytest.mark.rows("T18")
@pytest.mark.kills("ReducesAsComputedUnasked")
@pytest.mark.worlds(SEVERAL)
@parametrize("layout", Layout.REPLICATE, Layout.SHARD)
def test_gathers_in_the_compute_dtype_and_reduces_as_stored_when_asked_for_nothing_else(
    trial: Trial, layout: Layout
) -> None:
    gathers = Select(ops=(Op.ALL_GATHER,), phases=(Phase.FORWARD, Phase.BACKWARD))
    as_stored = frozenset({Capability.REDUCE_AS_STORED})
    trial.holds(
        _training(MLP_UNEVEN, None, layout=layout, demands=as_stored, microbatches=3),
        MatchesOracle(),
        RETURNS_BFLOAT16,
        Dtype(select=REDUCTIONS, dtype="float32"),
        *([Dtype(select=gathers, dtype="bfloat16")] if layout is Layout.SHARD else []),
        RanksAgree(),
    )


@pytest.mark.worlds(EVEN)
@pytest.mark.kills("ShardsTheFirstDim")
@parametrize("dtype", torch.bfloat16, torch.float16)
def test_computes_in_few_bits_along_the_largest_dim(trial: Trial, dtype: torch.dtype) -> None:
    training = _training(DIVISIBLE_MLP, layout=Layout.SHARD, placement=Placement.LARGEST, compute_dtype=dtype)
    crossing = Dtype(select=GATHERS, dtype=str(dtype).partition(".")[2])
    trial.holds(training, MatchesOracle(), LiesOnTheDimAskedFor(), crossing)


@pytest.mark.kills("ReturnsTheComputeDtype")
def test_returns_the_dtype_asked_for(trial: Trial) -> None:
    returns_float32 = Notes(subject=OUTPUT_DTYPE, value="torch.float32")
    trial.holds(_training(MLP_UNEVEN, output_dtype=torch.float32), MatchesOracle(), returns_float32)


@pytest.mark.rows("T18")
@pytest.mark.kills("CastsInputsOfTheFirstModuleAlone")
def test_casts_the_inputs_of_each_module_of_a_group(trial: Trial) -> None:
    trial.holds(_training(JOINT_CASTS, grouping=Grouping.REQUIRED), MatchesOracle(), RETURNS_BFLOAT16)


@pytest.mark.kills("ReducesReplicasInBfloat16")
@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
def test_reduces_across_replicas_in_float32_too(trial: Trial) -> None:
    trial.holds(_training(MLP_UNEVEN, layout=Layout.HYBRID), *PARITY)


@pytest.mark.kills("ReducesInBfloat16")
@pytest.mark.worlds(SEVERAL)
def test_reduces_in_the_parameters_dtype(trial: Trial) -> None:
    trial.holds(train(MLP_EVEN), Dtype(select=IN_BACKWARD, dtype="float32"), RanksAgree())


@pytest.mark.kills("KeepsFloat32OnTheWire")
@pytest.mark.worlds(SEVERAL)
def test_reduces_in_bfloat16_when_asked(trial: Trial) -> None:
    trial.holds(train(MLP_EVEN, reduce_dtype=torch.bfloat16), *PARITY)
