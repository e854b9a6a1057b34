"""The same training on the same ranks comes out the same ten times over, in every bit."""

from __future__ import annotations

import pytest

from shardproof import EVEN, Accumulation, Deterministic, Layout, MatchesOracle, Schedule, Trial
from shardproof.fixtures.optimizers import ADAMW
from shardproof.fixtures.problems import MLP_UNEVEN
from shardproof.suites.training import train

LAWS = (Deterministic(), MatchesOracle())
pytestmark = pytest.mark.kills("SumsInAnotherOrderEachTime")


@pytest.mark.parametrize("microbatches", [1, 3], ids="m{}".format)
def test_repeats_itself(trial: Trial, microbatches: int) -> None:
    training = train(
        MLP_UNEVEN,
        accumulation=Accumulation.LAST_MICROBATCH,
        schedule=Schedule(steps=1, microbatches=microbatches, repeats=10),
    )
    trial.holds(training, *LAWS)


@pytest.mark.worlds(EVEN)
def test_repeats_itself_on_two_replicas(trial: Trial) -> None:
    trial.holds(train(MLP_UNEVEN, ADAMW, layout=Layout.HYBRID, schedule=Schedule(steps=1, repeats=10)), *LAWS)
