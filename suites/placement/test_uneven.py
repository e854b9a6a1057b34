"""One group over dims that no world divides, or that have fewer rows than there are ranks."""

from __future__ import annotations

import pytest

from shardproof import HoldsItsShare, Layout, MatchesOracle, NamedOptimizer, RanksAgree
from shardproof import StateLiesWithItsParameter, Trial
from shardproof.fixtures.optimizers import ADAMW, SGD
from shardproof.fixtures.placements import UNEVEN_GROUP
from shardproof.suites.params import parametrize
from shardproof.suites.training import train


@pytest.mark.rows("T07")
@pytest.mark.kills("ShowsPaddingRows", "InfersTheSizeFromItsShard", "NeverUpdatesTheLastRanksRows")
@parametrize("optimizer", SGD, ADAMW)
def test_shards_rows_that_ranks_do_not_divide(trial: Trial, optimizer: NamedOptimizer) -> None:
    training = train(UNEVEN_GROUP, optimizer, layout=Layout.SHARD)
    trial.holds(training, MatchesOracle(), HoldsItsShare(), StateLiesWithItsParameter(), RanksAgree())


@pytest.mark.rows("R05")
@pytest.mark.kills("NeverUpdatesOneParameter")
def test_replicates_rows_that_ranks_do_not_divide(trial: Trial) -> None:
    training = train(UNEVEN_GROUP, layout=Layout.REPLICATE)
    trial.holds(training, MatchesOracle(), HoldsItsShare(), RanksAgree())
