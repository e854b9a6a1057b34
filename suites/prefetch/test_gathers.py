"""When a gather may start and who it blocks: after the optimizer step, at once if asked, for unused modules too."""

from __future__ import annotations

import pytest

from fixtures.chain import CHAIN, SPARE_CHAIN
from fixtures.optimizers import SGD
from shardproof import (
    SEVERAL,
    AllWaited,
    Asynchronous,
    Capability,
    Count,
    Exactly,
    Gathers,
    Grouping,
    Layout,
    MatchesOracle,
    Op,
    Order,
    Phase,
    Plan,
    RanksAgree,
    Reshard,
    Reshards,
    Select,
    Training,
    Trial,
    Watch,
)
from suites.communication.closed_forms import NUM_GROUPS

GATHERS = Select(ops=(Op.ALL_GATHER,))
REDUCTIONS = Select(ops=(Op.REDUCE_SCATTER,), phases=(Phase.BACKWARD,))
RIGHT = (MatchesOracle(), RanksAgree())


@pytest.mark.rows("T15", "R11")
@pytest.mark.kills("IgnoresTheStepEvent")
@pytest.mark.parametrize("layout", [Layout.SHARD, Layout.REPLICATE], ids=lambda x: x.name.lower())
def test_forward_sees_the_update_that_an_event_announces(trial: Trial, layout: Layout) -> None:
    plan = Plan(layout=layout, units=CHAIN.units, demands=frozenset({Capability.STEP_EVENT}))
    trial.holds(Training(problem=CHAIN, optimizer=SGD, plan=plan), *RIGHT)


@pytest.mark.rows("T11")
@pytest.mark.kills("GathersSynchronously", "ReadsTheGatherTooEarly")
@pytest.mark.worlds(SEVERAL)
def test_gathers_block_nobody_when_asked(trial: Trial) -> None:
    plan = Plan(
        layout=Layout.SHARD,
        units=CHAIN.units,
        reshard=Reshard.AFTER_FORWARD,
        demands=frozenset({Capability.ASYNC_GATHER}),
    )
    trial.holds(
        Training(problem=CHAIN, optimizer=SGD, plan=plan),
        Asynchronous(select=GATHERS),
        AllWaited(select=GATHERS),
        *RIGHT,
    )


@pytest.mark.rows("C18")
@pytest.mark.kills("GathersTheLastUnitFirst", "NeverReducesGroupsRunInPart")
@pytest.mark.worlds(SEVERAL)
def test_a_group_with_an_unused_module_is_treated_like_any_other(trial: Trial) -> None:
    """Reductions are counted: an engine may leave out what has no gradient, and then no size tells whose it is."""
    first, last = SPARE_CHAIN.units
    plan = Plan(
        layout=Layout.SHARD,
        units=(first, last),
        grouping=Grouping.REQUIRED,
        reshard=Reshard.AFTER_FORWARD,
        demands=frozenset({Capability.UNUSED, Capability.UNIT_STATE}),
    )
    trial.holds(
        Training(problem=SPARE_CHAIN, optimizer=SGD, plan=plan, watch=frozenset({Watch.UNITS})),
        Order(select=Select(phases=(Phase.FORWARD,)), events=(Gathers(first), Gathers(last))),
        Order(
            select=Select(phases=(Phase.BACKWARD,)),
            events=(Gathers(last), Gathers(first), Reshards(last), Reshards(first)),
        ),
        Count(select=REDUCTIONS, expected=Exactly(NUM_GROUPS)),
        *RIGHT,
    )
