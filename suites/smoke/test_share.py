"""The least that an engine must do which declares that it shards: hold its share, and no more."""

from __future__ import annotations

import pytest

from fixtures.optimizers import ADAMW
from fixtures.problems import MLP_EVEN
from shardproof import (
    SEVERAL,
    HoldsItsShare,
    Layout,
    MatchesOracle,
    MemoryIsExplained,
    Plan,
    RanksAgree,
    Training,
    Trial,
)


@pytest.mark.rows("T08", "R06")
@pytest.mark.kills("ReplicatesInsteadOfSharding", "CallsTheWholeItsChunks", "ShowsSlicesOfWholes")
@pytest.mark.kills("KeepsTheModelOnTheLastRank", "KeepsWholesAfterTheFirstStep")
@pytest.mark.kills("CutsGradientsFromWholeBuffers", "CutsStateFromWholeBuffers", "AveragesWholeParameters")
@pytest.mark.worlds(SEVERAL)
def test_holds_its_share(trial: Trial) -> None:
    plan = Plan(layout=Layout.SHARD, units=MLP_EVEN.units)
    training = Training(problem=MLP_EVEN, optimizer=ADAMW, plan=plan)
    trial.holds(training, MatchesOracle(), HoldsItsShare(), MemoryIsExplained(), RanksAgree())
