"""Gradients are clipped by the norm of the whole gradient, which every rank returns."""

from __future__ import annotations

import math

import pytest

from shardproof import EVEN, FOUR_OR_MORE_EVEN, SEVERAL, Clip, Count, Exactly, Layout, Per, Phase, Problem
from shardproof import Select, Training, Trial
from shardproof.fixtures.problems import MLP_EVEN, MLP_UNEVEN
from shardproof.fixtures.thin import ONE_NUMBER, SINGLE_ROWS
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY

kills = pytest.mark.kills
# A third to an eighth of the actual norms, so that the parameters still move; and far above all of them.
LIMITS = {1.0: 20.0, 2.0: 0.3, math.inf: 0.1}
PLENTY = 1000.0


def _order(norm_type: float, *mutants: str) -> object:
    return param(norm_type, id=f"norm_{norm_type:g}", kills=mutants)


@pytest.mark.worlds(SEVERAL)
@parametrize(
    "norm_type",
    _order(1.0, "ClipsByTheLocalNorm", "NeverClips"),
    _order(2.0, "ClipsByTheLocalNorm", "NeverClips", "ReturnsNoNorm"),
    _order(math.inf, "ClipsByTheLocalNorm", "TakesTheRootOfAMaximum"),
)
def test_clips_shards_by_the_norm_of_the_whole(trial: Trial, norm_type: float) -> None:
    trial.holds(_training(Layout.SHARD, Clip(max_norm=LIMITS[norm_type], norm_type=norm_type)), *PARITY)


@pytest.mark.worlds(EVEN)
@parametrize(
    "norm_type",
    _order(1.0, "CountsTheNormOncePerReplica"),
    _order(2.0, "CountsTheNormOncePerReplica"),
    _order(math.inf, "TakesTheRootOfAMaximum"),
)
def test_counts_a_replica_once(trial: Trial, norm_type: float) -> None:
    trial.holds(_training(Layout.HYBRID, Clip(max_norm=LIMITS[norm_type], norm_type=norm_type)), *PARITY)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("ClipsOnOneRank", "ReducesAgainOnceClipped")
def test_clips_replicas_alike(trial: Trial) -> None:
    trial.holds(_training(Layout.REPLICATE, Clip(max_norm=LIMITS[2.0]), problem=MLP_UNEVEN), *PARITY)


@pytest.mark.kills("ScalesSmallGradientsUp")
def test_leaves_small_gradients_alone(trial: Trial) -> None:
    trial.holds(_training(Layout.NATIVE, Clip(max_norm=PLENTY)), *PARITY)


@pytest.mark.kills("NeverClips")
def test_clips_what_all_microbatches_accumulated(trial: Trial) -> None:
    trial.holds(_training(Layout.NATIVE, Clip(max_norm=LIMITS[2.0]), microbatches=3), *PARITY)


@pytest.mark.worlds(SEVERAL)
@parametrize(
    "norm_type",
    _order(2.0, "ClipsByTheLocalNorm"),
    _order(math.inf, "ClipsByTheLocalNorm", "TakesTheRootOfAMaximum"),
)
def test_clips_where_most_ranks_own_nothing(trial: Trial, norm_type: float) -> None:
    clip = Clip(max_norm=LIMITS[norm_type], norm_type=norm_type)
    trial.holds(_training(Layout.SHARD, clip, problem=SINGLE_ROWS), *PARITY)


@pytest.mark.worlds(SEVERAL)
@parametrize("norm_type", _order(2.0, "ClipsByTheLocalNorm"), _order(math.inf, "ReducesIntoItsZero"))
def test_clips_where_one_rank_owns_everything(trial: Trial, norm_type: float) -> None:
    clip = Clip(max_norm=LIMITS[norm_type], norm_type=norm_type)
    trial.holds(_training(Layout.SHARD, clip, problem=ONE_NUMBER), *PARITY)


@pytest.mark.kills("AddsUpNormsOneByOne")
@parametrize(
    "layout, number",
    param(Layout.SHARD, 1, id="shard", worlds=SEVERAL),
    param(Layout.HYBRID, 1, id="hybrid", worlds=FOUR_OR_MORE_EVEN),
)
@parametrize("norm_type", 1.0, 2.0, math.inf, ids=["1", "2", "inf"])
def test_one_all_reduce_adds_up_the_norm(trial: Trial, layout: Layout, number: int, norm_type: float) -> None:
    in_step = Count(select=Select(phases=(Phase.STEP,)), expected=Exactly(number), per=Per.STEP)
    trial.holds(_training(layout, Clip(max_norm=LIMITS[norm_type], norm_type=norm_type)), *PARITY, in_step)


def _training(layout: Layout, clip: Clip, *, problem: Problem = MLP_EVEN, microbatches: int = 1) -> Training:
    return train(problem, layout=layout, microbatches=microbatches, clip=clip)
