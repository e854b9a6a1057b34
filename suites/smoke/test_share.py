"""The least that an engine must do which declares that it shards: hold its share, and no more."""

from __future__ import annotations

import pytest

from engine.contract import Layout, Plan
from fixtures.optimizers import ADAMW
from fixtures.problems import MLP_EVEN
from harness.cases.training import Training
from harness.laws.communication.matching import RanksAgree
from harness.laws.memory.census import MemoryIsExplained
from harness.laws.parity import MatchesOracle
from harness.laws.sharding.holdings import HoldsItsShare
from harness.runner.fixture import Trial
from harness.worlds.sizes import SEVERAL


@pytest.mark.rows("T08", "R06")
@pytest.mark.kills("ReplicatesInsteadOfSharding", "CallsTheWholeItsChunks", "ShowsSlicesOfWholes")
@pytest.mark.kills("KeepsTheModelOnTheLastRank", "KeepsWholesAfterTheFirstStep")
@pytest.mark.kills("CutsGradientsFromWholeBuffers", "CutsStateFromWholeBuffers", "AveragesWholeParameters")
@pytest.mark.worlds(SEVERAL)
def test_holds_its_share(trial: Trial) -> None:
    plan = Plan(layout=Layout.SHARD, units=MLP_EVEN.units)
    training = Training(problem=MLP_EVEN, optimizer=ADAMW, plan=plan)
    trial.holds(training, MatchesOracle(), HoldsItsShare(), MemoryIsExplained(), RanksAgree())
