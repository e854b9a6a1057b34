"""The least that an engine must do which declares that it shards: hold its share, and no more."""

from __future__ import annotations

import pytest

from shardproof import SEVERAL, HoldsItsShare, Layout, MatchesOracle, MemoryIsExplained, RanksAgree, Trial
from shardproof.fixtures.optimizers import ADAMW
from shardproof.fixtures.problems import MLP_EVEN
from shardproof.suites.training import train


@pytest.mark.rows("T08", "R06")
@pytest.mark.kills("ReplicatesInsteadOfSharding", "CallsTheWholeItsChunks", "ShowsSlicesOfWholes")
@pytest.mark.kills("KeepsTheModelOnTheLastRank", "KeepsWholesAfterTheFirstStep")
@pytest.mark.kills("CutsGradientsFromWholeBuffers", "CutsStateFromWholeBuffers", "AveragesWholeParameters")
@pytest.mark.worlds(SEVERAL)
def test_holds_its_share(trial: Trial) -> None:
    training = train(MLP_EVEN, ADAMW, layout=Layout.SHARD)
    trial.holds(training, MatchesOracle(), HoldsItsShare(), MemoryIsExplained(), RanksAgree())
