"""A forward that raises on every rank, after which it is skipped, or the step is done again."""

from __future__ import annotations

import pytest

from fixtures.guarded import GUARDED
from fixtures.optimizers import SGD
from shardproof import (
    RAISED,
    Accumulation,
    FailsFirst,
    Grouping,
    Layout,
    MatchesOracle,
    Notes,
    Plan,
    RanksAgree,
    Reshard,
    Schedule,
    SkipsAFailure,
    Training,
    Trial,
)

LAWS = (MatchesOracle(), RanksAgree(), Notes(subject=RAISED, value="FloatingPointError"))


@pytest.mark.rows("T21")
@pytest.mark.kills("DropsEarlierBackwards", "NeverRecovers")
@pytest.mark.parametrize(
    "reshard",
    [pytest.param(Reshard.AFTER_FORWARD, id="freed"), pytest.param(Reshard.KEEP, id="kept")],
)
def test_a_forward_that_raised_leaves_nothing_behind(trial: Trial, reshard: Reshard) -> None:
    script = SkipsAFailure()
    plan = Plan(
        layout=Layout.SHARD,
        units=GUARDED.units,
        grouping=Grouping.REQUIRED,
        reshard=reshard,
        demands=script.demands,
    )
    trial.holds(Training(problem=GUARDED, optimizer=SGD, plan=plan, script=script), *LAWS)


@pytest.mark.kills("LeaksTheFailedIteration")
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout.REPLICATE, id="replicate"),
        pytest.param(Layout.SHARD, id="shard", marks=pytest.mark.kills("NeverRecovers")),
    ],
)
def test_nothing_of_the_iteration_that_failed_is_learnt(trial: Trial, layout: Layout) -> None:
    script = FailsFirst()
    plan = Plan(
        layout=layout,
        units=GUARDED.units,
        accumulation=Accumulation.LAST_MICROBATCH,
        demands=script.demands,
    )
    training = Training(
        problem=GUARDED, optimizer=SGD, plan=plan, schedule=Schedule(microbatches=3), script=script
    )
    trial.holds(training, *LAWS)
