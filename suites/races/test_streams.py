"""Streams wait for each other. On a CPU numbers are right without that, so the streams themselves are watched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardproof import FOUR_OR_MORE_EVEN, SEVERAL, Accumulation, AllForwardsFirst, Backwards, Capability
from shardproof import Gather, Grouping, Layout, NoRaces, Prefetch, Problem, Reshard, Trial, UnshardByHand
from shardproof import Watch
from shardproof.fixtures.chain import CHAIN, CHECKPOINTED_CHAIN, LOOPED_CHAIN
from shardproof.fixtures.idle import FROZEN
from shardproof.fixtures.problems import MLP_UNEVEN
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train_sharded
from shardproof.suites.vocabulary import PARITY

pytestmark = pytest.mark.worlds(SEVERAL)

LAWS = (NoRaces(), *PARITY)
NATIVE = Reshard.NATIVE  # for engines that have only one way
of_one_unit = pytest.mark.kills(
    "GathersBeforeTheCopyIn",
    "ReducesBeforeGradientsAreThere",
    "ReducesBeforeTheCut",
    "GathersWhileTheStepWrites",
    "ReadsGathersUnderWay",
    "TakesReductionsAsDone",
)
of_several_units = pytest.mark.kills(
    "FreesTheReduceInput",
    "FreesTheCopiedBuffer",
    "RefillsTheReduceInput",
)
of_four = pytest.mark.worlds(FOUR_OR_MORE_EVEN)


@pytest.mark.kills("ReducesBeforeGradientsAreThere")
def test_streams_wait_whatever_the_layout(trial: Trial) -> None:
    _holds(trial, layout=Layout.NATIVE, grouping=Grouping.HINT, reshard=NATIVE, units=())


@of_one_unit
def test_streams_of_one_unit_wait(trial: Trial) -> None:
    _holds(trial, units=())


@of_one_unit
@of_several_units
@parametrize(
    "reshard",
    Reshard.NATIVE,
    param(Reshard.AFTER_FORWARD, id="freed"),
    param(Reshard.KEEP, id="kept"),
    param(Reshard.TO_PAIRS, id="pairs", kills="SendsPartsBeforeTheyAreCut", marks=of_four),
)
def test_streams_of_several_units_wait(trial: Trial, reshard: Reshard) -> None:
    _holds(trial, reshard=reshard)


@of_one_unit
@parametrize("problem", CHECKPOINTED_CHAIN, LOOPED_CHAIN, ids=["checkpointed", "looped"])
def test_streams_wait_where_units_run_twice(trial: Trial, problem: Problem) -> None:
    _holds(trial, problem, reshard=NATIVE)


@pytest.mark.kills("ReducesBeforeTheCut", "DividesBeforeTheReduction")
def test_streams_of_replicas_wait(trial: Trial) -> None:
    _holds(trial, layout=Layout.REPLICATE, grouping=Grouping.HINT, reshard=NATIVE)


@pytest.mark.kills("ReducesBeforeTheCut", "TakesTheSumOverReplicasAsDone")
@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
@parametrize(
    "reduce_dtype",
    param(None, id="own"),
    param(torch.bfloat16, kills="FreesReducedOutputs"),
)
def test_streams_of_a_hybrid_wait(trial: Trial, reduce_dtype: torch.dtype | None) -> None:
    _holds(trial, layout=Layout.HYBRID, reduce_dtype=reduce_dtype)


@pytest.mark.kills("GathersBeforeTheCopyIn", "ReducesBeforeGradientsAreThere", "ReducesBeforeTheCut")
def test_streams_wait_around_frozen_parameters(trial: Trial) -> None:
    _holds(trial, FROZEN, reshard=NATIVE)


@pytest.mark.kills("GathersBeforeTheCopyIn", "ReducesBeforeGradientsAreThere", "ReducesBeforeTheCut")
@parametrize(
    "layout, accumulation",
    param(Layout.SHARD, Accumulation.EVERY_MICROBATCH, id="shard-every", kills="TakesReductionsAsDone"),
    param(Layout.SHARD, Accumulation.LAST_MICROBATCH, id="shard-last"),
    param(Layout.HYBRID, Accumulation.EVERY_MICROBATCH, id="hybrid-every", marks=of_four),
    param(Layout.HYBRID, Accumulation.LAST_MICROBATCH, id="hybrid-last", marks=of_four),
)
def test_streams_wait_over_microbatches(trial: Trial, layout: Layout, accumulation: Accumulation) -> None:
    _holds(trial, layout=layout, reshard=NATIVE, accumulation=accumulation, microbatches=3)


@pytest.mark.kills("ReadsGathersUnderWay", "FreesTheCopiedBuffer")
@parametrize("distance", 1, 2)
def test_streams_of_prefetched_units_wait(trial: Trial, distance: int) -> None:
    ahead = Prefetch.by_distance(CHAIN.units, forward=distance, backward=distance)
    _holds(trial, prefetch=ahead)


@pytest.mark.kills("GathersWhileTheStepWrites")
def test_gathers_wait_for_the_event_of_the_step(trial: Trial) -> None:
    _holds(trial, demands=frozenset({Capability.STEP_EVENT}))


@pytest.mark.kills("FreesTheReduceInput")
def test_streams_wait_with_several_reductions_in_flight(trial: Trial) -> None:
    _holds(trial, max_reduce_buffers=3)


@pytest.mark.kills("GathersByHandBeforeTheWrite")
def test_streams_wait_for_gathers_by_hand(trial: Trial) -> None:
    script = UnshardByHand(units=CHAIN.units, gather=Gather.UNAWAITED)
    _holds(trial, script=script, demands=frozenset({Capability.ASYNC_GATHER}))


@pytest.mark.kills("ReducesBeforeGradientsAreThere", "ReducesBeforeTheCut")
def test_streams_wait_around_a_dtype_for_reductions(trial: Trial) -> None:
    """The reduced result is cast and freed on the last stream."""
    _holds(trial, reduce_dtype=torch.bfloat16)


@pytest.mark.kills("ReadsGathersUnderWay", "FreesTheCopiedBuffer")
def test_streams_wait_where_forwards_wait_for_their_backwards(trial: Trial) -> None:
    """Buffers that a backward gathered ahead and did not use are reused by gathers of the next one."""
    script = AllForwardsFirst(backwards=Backwards.ONE_BY_ONE)
    _holds(trial, MLP_UNEVEN, grouping=Grouping.HINT, reshard=NATIVE, microbatches=2, script=script)


# Any: as for `train`.
def _holds(trial: Trial, problem: Problem = CHAIN, **asked: Any) -> None:
    watch = frozenset({Watch.RACES})
    trial.holds(train_sharded(problem, **{"reshard": Reshard.AFTER_FORWARD, "watch": watch, **asked}), *LAWS)
