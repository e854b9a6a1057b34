"""A replicating engine gathers nothing and reduces each gradient once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardproof import (
    SEVERAL,
    AllWaited,
    Between,
    Bytes,
    Count,
    Exactly,
    Grouping,
    Layout,
    MatchesOracle,
    Nothing,
)
from shardproof import OnlyThese, Op, Phase, Problem, RanksAgree, Select, Trial
from shardproof.fixtures.problems import MLP_EVEN, MLP_UNEVEN, TRANSFORMER
from shardproof.suites.closed_forms import GRADIENT_BYTES, MOST_BUCKETS, NUM_GROUPS, NUM_PARAMETERS
from shardproof.suites.params import parametrize
from shardproof.suites.training import train

pytestmark = pytest.mark.worlds(SEVERAL)

REDUCTIONS = Select(ops=(Op.ALL_REDUCE,), phases=(Phase.BACKWARD,), dtypes=("float32",))
GATHERS = Select(ops=(Op.ALL_GATHER, Op.REDUCE_SCATTER))
PROBLEMS = [MLP_EVEN, MLP_UNEVEN, TRANSFORMER]
# The last of three steps: an engine may still rebuild its buckets in the second forward.
SETTLED = (2,)


@pytest.mark.kills("ForgetsToSynchroniseOneParameter", "NeverSynchronises")
@parametrize("problem", *PROBLEMS)
def test_reduces_each_gradient_once(trial: Trial, problem: Problem) -> None:
    trial.holds(
        train(problem, layout=Layout.REPLICATE),
        Bytes(select=REDUCTIONS, expected=Exactly(GRADIENT_BYTES), minimum=GRADIENT_BYTES),
        Nothing(select=GATHERS),
        OnlyThese(
            selects=(replace(REDUCTIONS, steps=SETTLED),), among=Select(dtypes=("float32",), steps=SETTLED)
        ),
        AllWaited(select=REDUCTIONS),
        RanksAgree(),
    )


@pytest.mark.kills("IgnoresTheSizeOfBuckets", "LeavesOutWhatFillsABucket")
@parametrize("layout", Layout.REPLICATE, Layout.ZERO1)
def test_reduces_each_gradient_alone_in_the_smallest_buckets(trial: Trial, layout: Layout) -> None:
    trial.holds(
        train(MLP_EVEN, layout=layout, bucket_bytes=1),
        MatchesOracle(),
        Count(select=replace(REDUCTIONS, steps=SETTLED), expected=Exactly(NUM_PARAMETERS)),
        RanksAgree(),
    )


@pytest.mark.kills("LeavesOutTheLastOfABucket", "ReducesOneByOneAfterTheFirstBucket")
@pytest.mark.worlds(SEVERAL)
@pytest.mark.parametrize("microbatches", [1, 3], ids="m{}".format)
@pytest.mark.parametrize("layout", [Layout.REPLICATE, Layout.ZERO1], ids=lambda layout: layout.name.lower())
def test_trains_the_same_model_in_buckets_of_several(trial: Trial, layout: Layout, microbatches: int) -> None:
    """No gradient fills a bucket, and they do not all fit into one."""
    training = train(MLP_EVEN, layout=layout, bucket_bytes=2048, microbatches=microbatches)
    settled = replace(REDUCTIONS, steps=SETTLED)
    trial.holds(
        training, MatchesOracle(), Count(select=settled, expected=Between(1, MOST_BUCKETS)), RanksAgree()
    )


@pytest.mark.kills("TakesAllUnitsForOne")
@parametrize("problem", *PROBLEMS)
def test_reduces_each_group_in_one_collective(trial: Trial, problem: Problem) -> None:
    trial.holds(
        train(problem, layout=Layout.REPLICATE, grouping=Grouping.REQUIRED),
        Count(select=REDUCTIONS, expected=Exactly(NUM_GROUPS)),
        RanksAgree(),
    )
