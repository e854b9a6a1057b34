"""When a gather starts and whether it blocks: after the step, asynchronously on request, unused modules included."""

from __future__ import annotations

import pytest

from shardproof import FOUR_OR_MORE_EVEN, SEVERAL, AllWaited, Asynchronous, Capability, Count, Exactly
from shardproof import Gathers, Layout, Order, Reshard, Reshards, Trial, Watch
from shardproof.fixtures.chain import CHAIN, SPARE_CHAIN
from shardproof.suites.closed_forms import NUM_GROUPS
from shardproof.suites.params import parametrize
from shardproof.suites.training import train, train_sharded
from shardproof.suites.vocabulary import GATHERS, IN_BACKWARD, IN_FORWARD, PARITY, REDUCE_SCATTERS


@pytest.mark.rows("T15", "R11")
@pytest.mark.kills("IgnoresTheStepEvent")
@parametrize("layout", Layout.SHARD, Layout.REPLICATE)
def test_forward_sees_the_update_that_an_event_announces(trial: Trial, layout: Layout) -> None:
    trial.holds(train(CHAIN, layout=layout, demands=frozenset({Capability.STEP_EVENT})), *PARITY)


@pytest.mark.rows("T11")
@pytest.mark.kills("GathersSynchronously", "ReadsTheGatherTooEarly")
@pytest.mark.worlds(SEVERAL)
def test_gathers_block_nobody_when_asked(trial: Trial) -> None:
    training = train(
        CHAIN,
        layout=Layout.SHARD,
        reshard=Reshard.AFTER_FORWARD,
        demands=frozenset({Capability.ASYNC_GATHER}),
    )
    trial.holds(training, Asynchronous(select=GATHERS), AllWaited(select=GATHERS), *PARITY)


@pytest.mark.rows("T35")
@pytest.mark.kills("GathersSynchronously", "ReadsTheGatherTooEarly")
@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
def test_replicas_of_shards_block_nobody_when_asked(trial: Trial) -> None:
    training = train(CHAIN, layout=Layout.HYBRID, demands=frozenset({Capability.ASYNC_GATHER}))
    trial.holds(training, Asynchronous(select=GATHERS), AllWaited(select=GATHERS), *PARITY)


@pytest.mark.rows("C18")
@pytest.mark.kills("GathersTheLastUnitFirst", "NeverReducesGroupsRunInPart")
@pytest.mark.worlds(SEVERAL)
def test_a_group_with_an_unused_module_is_treated_like_any_other(trial: Trial) -> None:
    """Reductions are counted: an engine may leave out absent gradients, and then sizes identify no unit."""
    first, last = SPARE_CHAIN.units
    training = train_sharded(
        SPARE_CHAIN,
        units=(first, last),
        reshard=Reshard.AFTER_FORWARD,
        demands=frozenset({Capability.UNUSED}),
        watch=frozenset({Watch.UNITS}),
    )
    trial.holds(
        training,
        Order(select=IN_FORWARD, events=(Gathers(first), Gathers(last))),
        Order(select=IN_BACKWARD, events=(Gathers(last), Gathers(first), Reshards(last), Reshards(first))),
        Count(select=REDUCE_SCATTERS, expected=Exactly(NUM_GROUPS)),
        *PARITY,
    )
