"""The same training on the same ranks is equal in every bit, ten times over, and however often it is read."""

from __future__ import annotations

import pytest

from shardproof import EVEN, Accumulation, Deterministic, Layout, MatchesOracle, Schedule, Trial
from shardproof.fixtures.optimizers import ADAMW
from shardproof.fixtures.problems import MLP_UNEVEN
from shardproof.suites.params import parametrize
from shardproof.suites.training import train

LAWS = (Deterministic(), MatchesOracle())
UNSTABLE = pytest.mark.kills("SumsInAnotherOrderEachTime")


@UNSTABLE
@parametrize("microbatches", 1, 3, ids="m{}".format)
def test_repeats_itself(trial: Trial, microbatches: int) -> None:
    training = train(
        MLP_UNEVEN,
        accumulation=Accumulation.LAST_MICROBATCH,
        schedule=Schedule(steps=1, microbatches=microbatches, repeats=10),
    )
    trial.holds(training, *LAWS)


@UNSTABLE
@pytest.mark.worlds(EVEN)
def test_repeats_itself_on_two_replicas(trial: Trial) -> None:
    trial.holds(train(MLP_UNEVEN, ADAMW, layout=Layout.HYBRID, schedule=Schedule(steps=1, repeats=10)), *LAWS)


@pytest.mark.kills("AveragesWhatIsRead")
def test_is_the_same_where_it_is_not_read(trial: Trial) -> None:
    schedule = Schedule(steps=2, repeats=2, are_repeats_read=False)
    trial.holds(train(MLP_UNEVEN, schedule=schedule), *LAWS)
