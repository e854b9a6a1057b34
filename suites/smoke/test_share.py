"""The minimum for an engine that declares that it shards: it holds its share, and no more."""

from __future__ import annotations

import pytest

from shardproof import APART, SEVERAL, HoldsItsShare, Layout, MatchesOracle, MemoryIsExplained, RanksAgree
from shardproof import Trial, Watch
from shardproof.fixtures.optimizers import ADAMW
from shardproof.fixtures.problems import MLP_EVEN, MLP_WIDE
from shardproof.suites.params import parametrize
from shardproof.suites.training import train


@pytest.mark.kills("KeepsTheStateOfAllRanks", "SharesNothing")
@pytest.mark.worlds(SEVERAL)
@parametrize("layout", Layout.ZERO1, Layout.ZERO2)
def test_holds_parameters_and_its_share_of_the_rest(trial: Trial, layout: Layout) -> None:
    training = train(MLP_EVEN, ADAMW, layout=layout)
    trial.holds(training, MatchesOracle(), HoldsItsShare(), MemoryIsExplained(), RanksAgree())


@pytest.mark.rows("T08", "R06")
@pytest.mark.kills("ReplicatesInsteadOfSharding", "CallsTheWholeItsChunks", "ShowsSlicesOfWholes")
@pytest.mark.kills("KeepsTheModelOnTheLastRank", "KeepsWholesAfterTheFirstStep")
@pytest.mark.kills("CutsGradientsFromWholeBuffers", "CutsStateFromWholeBuffers", "AveragesWholeParameters")
@pytest.mark.worlds(SEVERAL)
def test_holds_its_share(trial: Trial) -> None:
    training = train(MLP_EVEN, ADAMW, layout=Layout.SHARD)
    trial.holds(training, MatchesOracle(), HoldsItsShare(), MemoryIsExplained(), RanksAgree())


@pytest.mark.kills("KeepsTheModelInArrays", "KeepsTheModelOnTheLastRank")
@pytest.mark.worlds(APART)
def test_its_process_holds_its_share(trial: Trial) -> None:
    training = train(MLP_WIDE, layout=Layout.SHARD, steps=1, watch=frozenset({Watch.ALLOCATOR}))
    trial.holds(training, MatchesOracle(), MemoryIsExplained())
