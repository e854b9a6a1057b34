"""Training ends, on every rank."""

from __future__ import annotations

import pytest

from shardproof import RanksAgree, Trial
from shardproof.fixtures.problems import MLP_EVEN
from shardproof.suites.training import train


# An infinite computation is only detected at the deadline, which this timeout shortens; it is still generous.
@pytest.mark.timeout(33)
@pytest.mark.kills("SkipsACountOnTheLastRank", "TakesTwoGroupsInTurn", "ReducesInTheWrongGroup")
@pytest.mark.kills("SendsToNobody", "CountsFewerParametersOnTheLastRank", "SkipsABackwardOnTheLastRank")
@pytest.mark.kills("NeverComesToAnEnd", "LocksItselfOut", deadline_s=10)
def test_every_rank_comes_to_its_end(trial: Trial) -> None:
    trial.holds(train(MLP_EVEN, units=(), steps=3), RanksAgree())
