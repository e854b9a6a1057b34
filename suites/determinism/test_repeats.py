"""The same training on the same ranks comes out the same ten times over, in every bit."""

from __future__ import annotations

import pytest

from fixtures.optimizers import ADAMW, SGD
from fixtures.problems import MLP_UNEVEN
from shardproof import (
    EVEN,
    Accumulation,
    Deterministic,
    Layout,
    MatchesOracle,
    Plan,
    Schedule,
    Training,
    Trial,
)

LAWS = (Deterministic(), MatchesOracle())
pytestmark = pytest.mark.kills("SumsInAnotherOrderEachTime")


@pytest.mark.parametrize("microbatches", [1, 3], ids="m{}".format)
def test_repeats_itself(trial: Trial, microbatches: int) -> None:
    plan = Plan(units=MLP_UNEVEN.units, accumulation=Accumulation.LAST_MICROBATCH)
    schedule = Schedule(steps=1, microbatches=microbatches, repeats=10)
    trial.holds(Training(problem=MLP_UNEVEN, optimizer=SGD, plan=plan, schedule=schedule), *LAWS)


@pytest.mark.worlds(EVEN)
def test_repeats_itself_on_two_replicas(trial: Trial) -> None:
    plan = Plan(layout=Layout.HYBRID, units=MLP_UNEVEN.units)
    schedule = Schedule(steps=1, repeats=10)
    trial.holds(Training(problem=MLP_UNEVEN, optimizer=ADAMW, plan=plan, schedule=schedule), *LAWS)
