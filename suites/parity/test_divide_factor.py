"""Gradients are the sum over ranks divided by the plan's factor, in every layout of the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardproof import ALONE, FOUR_OR_MORE_EVEN, SEVERAL, HoldsItsShare, Layout, MatchesOracle, RanksAgree
from shardproof import Replicas, Training, Trial, Wire
from shardproof.fixtures.problems import MLP_UNEVEN
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY

LAWS = (MatchesOracle(), HoldsItsShare(), RanksAgree())
WORLD = None  # the number of ranks: an engine's default divisor
# float64 beside float32: it is one of the dtypes in which engines divide partly before and partly after the sum.
FACTORS = [
    param(1, None, id="one-float32", kills="AveragesWhateverTheFactor"),
    param(2, None, id="two-float32", kills="DividesByTheSquareOfTheFactor"),
    param(2, torch.float64, id="two-float64", kills="DividesByTheSquareOfTheFactor"),
    param(WORLD, torch.float64, id="world-float64", kills="DividesByTheSquareOfTheFactor", worlds=SEVERAL),
]


@pytest.mark.rows("C08")
@parametrize("factor, reduce_dtype", *FACTORS)
@parametrize("layout", Layout.REPLICATE, Layout.SHARD)
def test_divides_as_asked(
    trial: Trial, layout: Layout, factor: int | None, reduce_dtype: torch.dtype | None
) -> None:
    trial.holds(_training(factor or trial.world_size, layout=layout, reduce_dtype=reduce_dtype), *LAWS)


@pytest.mark.rows("C08", "C27")
@pytest.mark.kills("DividesByTheSquareOfTheFactor")
@pytest.mark.worlds(SEVERAL)
@parametrize(
    "reduce_dtype, wire",
    param(torch.float64, Wire.NATIVE, id="before-and-after"),
    param(None, Wire.SUM, id="after"),
)
def test_divides_sums_of_shards_by_more_than_the_ranks(
    trial: Trial, reduce_dtype: torch.dtype | None, wire: Wire
) -> None:
    """By 8: it has a factor for either side of the sum, and is not the size of a usual world."""
    trial.holds(_training(8, layout=Layout.SHARD, reduce_dtype=reduce_dtype, wire=wire), *LAWS)


@pytest.mark.rows("C08")
@parametrize("factor, reduce_dtype", *FACTORS)
@parametrize(
    "replicas", param(Replicas.TWO, worlds=FOUR_OR_MORE_EVEN), param(Replicas.SINGLES, worlds=SEVERAL)
)
def test_divides_as_asked_on_replicas(
    trial: Trial, replicas: Replicas, factor: int | None, reduce_dtype: torch.dtype | None
) -> None:
    divisor = factor or trial.world_size
    training = _training(divisor, layout=Layout.HYBRID, replicas=replicas, reduce_dtype=reduce_dtype)
    trial.holds(training, *LAWS)


@pytest.mark.rows("C08")
@pytest.mark.kills("IgnoresTheDivideFactorOfOneRank")
@pytest.mark.worlds(SEVERAL)
def test_divides_by_one_on_single_ranks(trial: Trial) -> None:
    training = _training(1, layout=Layout.HYBRID, replicas=Replicas.SINGLES, reduce_dtype=torch.float32)
    trial.holds(training, *LAWS)


@pytest.mark.rows("C08")
@pytest.mark.kills("AveragesWhateverTheFactor")
@pytest.mark.worlds(SEVERAL)
def test_divides_as_asked_what_bfloat16_computed(trial: Trial) -> None:
    trial.holds(_training(1, compute_dtype=torch.bfloat16, reduce_dtype=torch.float32), *PARITY)


@pytest.mark.rows("C29")
@pytest.mark.kills("HalvesOneUnit")
@pytest.mark.worlds(ALONE)
@parametrize(
    "factor",
    param(None, id="none"),
    param(1, id="one"),
    param(2, id="two", kills="IgnoresTheDivideFactorOfOneRank"),
)
def test_one_rank_divides_by_the_factor_alone(trial: Trial, factor: int | None) -> None:
    trial.holds(_training(factor, layout=Layout.SHARD), *LAWS)


# Any: as for `train`.
def _training(factor: int | None, **asked: Any) -> Training:
    # With several units: a factor that reaches only the root does not reach them.
    return train(MLP_UNEVEN, divide_factor=factor, **asked)
