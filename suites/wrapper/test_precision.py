"""mixed_precision: which dtypes forward computes in, gradients are reduced in, and shards are kept in."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import MixedPrecision

from shardproof import SEVERAL, MatchesOracle, Notes, Trial
from suites.wrapper.exercises.precision import casts, excepts_batch_norm, keeps, reduces
from suites.wrapper.exercising import exercise

LOW, HIGH = torch.bfloat16, torch.float32
FULL = "float32, float32, float32"
pytestmark = pytest.mark.api("mixed_precision", "MixedPrecision")


@pytest.mark.parametrize(
    ("precision", "root", "unit", "output"),
    [
        pytest.param(
            MixedPrecision(),
            FULL,
            FULL,
            HIGH,
            id="nothing",
            marks=pytest.mark.kills("ComputesInBfloat16Unasked"),
        ),
        pytest.param(
            MixedPrecision(param_dtype=LOW),
            "bfloat16, bfloat16, float32",
            "float32, bfloat16, float32",  # inputs of units are left as they are unless told otherwise
            LOW,
            id="parameters",
            marks=pytest.mark.kills("IgnoresMixedPrecision"),
        ),
        pytest.param(
            MixedPrecision(param_dtype=LOW, cast_root_forward_inputs=False),
            "float32, bfloat16, float32",
            "float32, bfloat16, float32",
            LOW,
            id="no-inputs",
            marks=pytest.mark.kills("IgnoresCastFlags", "IgnoresMixedPrecision"),
        ),
        pytest.param(
            MixedPrecision(param_dtype=LOW, cast_forward_inputs=True),
            "bfloat16, bfloat16, float32",
            "bfloat16, bfloat16, float32",
            LOW,
            id="all-inputs",
            marks=pytest.mark.kills("IgnoresCastFlags", "IgnoresMixedPrecision"),
        ),
        pytest.param(
            MixedPrecision(buffer_dtype=LOW),
            "float32, float32, bfloat16",
            "float32, float32, bfloat16",
            HIGH,
            id="buffers",
            marks=pytest.mark.kills("IgnoresMixedPrecision"),
        ),
        pytest.param(
            MixedPrecision(reduce_dtype=LOW),
            FULL,
            FULL,
            HIGH,
            id="reductions",
            marks=pytest.mark.kills("ComputesInTheReduceDtype"),
        ),
    ],
)
def test_computes_in_the_dtypes_named(
    trial: Trial, precision: MixedPrecision, root: str, unit: str, output: torch.dtype
) -> None:
    trial.holds(
        exercise(casts, precision),
        Notes(subject="the root saw", value=root),
        Notes(subject="the unit saw", value=unit),
        Notes(subject="the root returned", value=str(output)),
        MatchesOracle(),
    )


@pytest.mark.parametrize(
    ("precision", "gradients"),
    [
        pytest.param(
            MixedPrecision(param_dtype=LOW),
            HIGH,
            id="full",
            marks=pytest.mark.kills("KeepsLowGradients", "RoundsTheShards"),
        ),
        pytest.param(
            MixedPrecision(param_dtype=LOW, keep_low_precision_grads=True),
            LOW,
            id="low",
            marks=pytest.mark.kills("IgnoresMixedPrecision", "RoundsTheShards"),
        ),
        pytest.param(
            MixedPrecision(reduce_dtype=LOW),
            HIGH,
            id="reduced-low",
            marks=pytest.mark.kills("RoundsTheShards"),
        ),
    ],
)
def test_keeps_shards_in_full_precision(
    trial: Trial, precision: MixedPrecision, gradients: torch.dtype
) -> None:
    trial.holds(
        exercise(keeps, precision),
        Notes(subject="gradients are", value=str(gradients)),
        Notes(subject="shards are", value="torch.float32"),
        Notes(subject="shards are updated in full", value="True"),
        MatchesOracle(),
    )


@pytest.mark.worlds(SEVERAL)  # a lone rank averages nothing
@pytest.mark.parametrize(
    ("precision", "is_precise"),
    [
        pytest.param(
            MixedPrecision(), True, id="nothing", marks=pytest.mark.kills("ComputesInBfloat16Unasked")
        ),
        pytest.param(
            MixedPrecision(reduce_dtype=LOW),
            False,
            id="low",
            marks=pytest.mark.kills("IgnoresMixedPrecision"),
        ),
        pytest.param(
            MixedPrecision(param_dtype=LOW),
            False,
            id="as-computed",
            marks=pytest.mark.kills("IgnoresMixedPrecision"),
        ),
        pytest.param(
            MixedPrecision(param_dtype=LOW, reduce_dtype=HIGH),
            True,
            id="high",
            marks=pytest.mark.kills("ReducesInTheComputeDtype"),
        ),
    ],
)
def test_reduces_in_the_dtype_named(trial: Trial, precision: MixedPrecision, is_precise: bool) -> None:
    trial.holds(
        exercise(reduces, precision),
        Notes(subject="the mean is precise", value=str(is_precise)),
        Notes(subject="gradients seen", value="1"),
        MatchesOracle(),
    )


@pytest.mark.kills("CastsBatchNorm")
@pytest.mark.api("auto_wrap_policy")
def test_batch_norm_computes_in_full_precision(trial: Trial) -> None:
    trial.holds(
        exercise(excepts_batch_norm),
        Notes(subject="the layer is", value="torch.bfloat16"),
        Notes(subject="the norm is", value="torch.float32"),
        Notes(subject="the norm is given", value="torch.float32"),
        Notes(subject="statistics are", value="['torch.float32']"),
        MatchesOracle(),
    )
