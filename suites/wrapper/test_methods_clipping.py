"""Clipping by the wrapper's own method: the norm of the whole gradient, told to every rank, and what is left."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.fsdp import ShardingStrategy

from shardproof import FOUR_OR_MORE_EVEN, SEVERAL, Trial
from suites.wrapper import norms
from suites.wrapper.exercised import hold
from suites.wrapper.specimens import Form

pytestmark = pytest.mark.api("clip_grad_norm_")
CLIPPED = ("the norm", "clipped gradients")
kills = pytest.mark.kills


def _order(norm_type: float, *mutants: str) -> object:
    return pytest.param(norm_type, id=f"norm_{norm_type:g}", marks=kills(*mutants) if mutants else ())


of_each_norm = pytest.mark.parametrize(
    "norm_type",
    [
        _order(1.0, "SumsNormsOfReplicas"),
        _order(2.0, "SumsNormsOfReplicas"),
        _order(math.inf, "SumsTheLargest"),
    ],
)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.parametrize("form", Form, ids=lambda form: form.name.lower())
@pytest.mark.parametrize(
    "norm_type",
    [
        _order(1.0, "ClipsShardsByTheirOwnNorm"),
        _order(2.0, "ClipsShardsByTheirOwnNorm", "ClipsAndTellsNothing"),
        _order(math.inf, "SumsTheLargest"),
    ],
)
def test_clips_shards_by_the_norm_of_the_whole(trial: Trial, norm_type: float, form: Form) -> None:
    arguments = (ShardingStrategy.FULL_SHARD, form, norm_type)
    hold(trial, norms.clip, *CLIPPED, arguments=arguments)


@pytest.mark.worlds(SEVERAL)
@of_each_norm
def test_counts_what_is_replicated_once(trial: Trial, norm_type: float) -> None:
    arguments = (ShardingStrategy.NO_SHARD, Form.ORIGINAL, norm_type)
    hold(trial, norms.clip, *CLIPPED, arguments=arguments)


@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
@of_each_norm
def test_counts_shards_of_several_replicas_once(trial: Trial, norm_type: float) -> None:
    hold(trial, norms.clip_hybrid, *CLIPPED, arguments=(norm_type,))


@pytest.mark.worlds(SEVERAL)
@of_each_norm
def test_clips_a_mixture_of_shards_and_replicas(trial: Trial, norm_type: float) -> None:
    hold(trial, norms.clip_a_mixture, *CLIPPED, arguments=(norm_type,))


@pytest.mark.worlds(SEVERAL)
@of_each_norm
def test_counts_what_it_ignores_once(trial: Trial, norm_type: float) -> None:
    hold(trial, norms.clip_beside_ignored, *CLIPPED, arguments=(norm_type,))


@pytest.mark.kills("ScalesLittleUp")
def test_leaves_little_gradients_alone(trial: Trial) -> None:
    hold(trial, norms.clip_little, "the norm", "gradients")


@pytest.mark.kills("ClipsAndTellsNothing")
def test_tells_a_norm_of_nothing(trial: Trial) -> None:
    hold(trial, norms.clip_nothing, "the norm")


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("ClipsShardsByTheirOwnNorm")
def test_tells_the_norm_to_ranks_that_have_nothing(trial: Trial) -> None:
    hold(trial, norms.clip_where_few_have_any, "the norm", "the number afterwards")


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(torch.float64, marks=kills("ClipsShardsByTheirOwnNorm")),
        pytest.param(torch.bfloat16, marks=kills("TellsNormsInSinglePrecision")),
    ],
    ids=lambda d: str(d).partition(".")[2],
)
def test_tells_the_norm_in_the_dtype_of_gradients(trial: Trial, dtype: torch.dtype) -> None:
    hold(trial, norms.clip_in_dtype, "the norm", arguments=(dtype,))


@pytest.mark.kills("ClipsUnitsAlone")
def test_refuses_to_clip_a_unit(trial: Trial) -> None:
    hold(trial, norms.clip_of_a_unit, "clipping a unit")
