"""Streams wait for each other: numbers are right on a CPU without that too, so the streams are watched themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardproof import FOUR_OR_MORE_EVEN, SEVERAL, Accumulation, AllForwardsFirst, Backwards, Capability
from shardproof import EachMicrobatch, Gather, Grouping, Layout, NoRaces, Plan, Prefetch, Problem, Reshard
from shardproof import Schedule, Script, Training, Trial, UnshardByHand, Watch
from shardproof.fixtures.chain import CHAIN, CHECKPOINTED_CHAIN, LOOPED_CHAIN
from shardproof.fixtures.idle import FROZEN
from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.problems import MLP_UNEVEN
from shardproof.suites.params import param
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY

LAWS = (NoRaces(), *PARITY)
SHARDED = Plan(
    layout=Layout.SHARD, units=CHAIN.units, grouping=Grouping.REQUIRED, reshard=Reshard.AFTER_FORWARD
)
NATIVE = replace(SHARDED, reshard=Reshard.NATIVE)  # for engines that have one way alone
HYBRID = replace(SHARDED, layout=Layout.HYBRID)
of_one_unit = pytest.mark.kills(
    "GathersBeforeTheCopyIn",
    "CopiesOutDuringTheGather",
    "ReducesBeforeGradientsAreThere",
    "GathersDuringTheStep",
    "ReducesBeforeTheCut",
    "GathersWhileTheStepWrites",
    "StepsWhileGradientsAreReduced",
    "ReadsGathersUnderWay",
    "TakesReductionsAsDone",
)
of_one_flat_unit = pytest.mark.kills(
    "ComputesForwardDuringTheGather",
    "GathersFlatParametersDuringTheStep",
    "ReducesFlatGradientsInTheMaking",
    "StepsOnFlatGradientsInTheMaking",
)
of_several_units = pytest.mark.kills(
    "FreesTheReduceInput",
    "ReusesTheReduceInput",
    "FreesTheGatherOutput",
    "FreesTheCopiedBuffer",
    "RefillsTheReduceInput",
)
# There the watch has yet to be seen at work; `--thorough` asks for it.
not_on_cuda = pytest.mark.device("!cuda")
of_four = pytest.mark.worlds(FOUR_OR_MORE_EVEN)


@not_on_cuda
@pytest.mark.kills("ReducesBeforeGradientsAreThere")
@pytest.mark.worlds(SEVERAL)
def test_streams_wait_whatever_the_layout(trial: Trial) -> None:
    _holds(trial, Plan())


@not_on_cuda
@of_one_unit
@of_one_flat_unit
@pytest.mark.worlds(SEVERAL)
def test_streams_of_one_unit_wait(trial: Trial) -> None:
    _holds(trial, replace(SHARDED, units=()))


@not_on_cuda
@of_one_unit
@of_several_units
@pytest.mark.worlds(SEVERAL)
@pytest.mark.parametrize(
    "reshard",
    [
        pytest.param(Reshard.NATIVE, marks=of_one_flat_unit),
        pytest.param(
            Reshard.AFTER_FORWARD,
            id="freed",
            marks=[
                of_one_flat_unit,
                pytest.mark.kills(
                    "FreesTheGatherOutputInBackward",
                    "FreesTheLastGatherOutput",
                    "RunsTheHookDuringTheReduction",
                    "ComputesBackwardDuringTheGather",
                ),
            ],
        ),
        pytest.param(Reshard.KEEP, id="kept", marks=of_one_flat_unit),
        pytest.param(
            Reshard.TO_PAIRS,
            id="pairs",
            marks=[
                of_four,
                pytest.mark.kills(
                    "GathersPartsBeforeTheyAreCut",
                    "SendsPartsBeforeTheyAreCut",
                    "FreesTheGatherOutputInBackward",
                ),
            ],
        ),
    ],
)
def test_streams_of_several_units_wait(trial: Trial, reshard: Reshard) -> None:
    _holds(trial, replace(SHARDED, reshard=reshard))


@not_on_cuda
@of_one_unit
@of_one_flat_unit
@pytest.mark.worlds(SEVERAL)
@pytest.mark.parametrize("problem", [CHECKPOINTED_CHAIN, LOOPED_CHAIN], ids=["checkpointed", "looped"])
def test_streams_wait_where_units_run_twice(trial: Trial, problem: Problem) -> None:
    _holds(trial, NATIVE, problem=problem)


@not_on_cuda
@pytest.mark.kills("ReducesBeforeTheCut", "DividesBeforeTheReduction")
@pytest.mark.worlds(SEVERAL)
def test_streams_of_replicas_wait(trial: Trial) -> None:
    _holds(trial, Plan(layout=Layout.REPLICATE, units=CHAIN.units))


@not_on_cuda
@pytest.mark.kills(
    "ReducesReplicasBeforeTheScatter",
    "EndsBackwardWithoutAWait",
    "ReducesBeforeTheCut",
    "TakesTheSumOverReplicasAsDone",
)
@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
@pytest.mark.parametrize(
    "reduce_dtype",
    [
        pytest.param(None, id="own"),
        param(torch.bfloat16, kills=("FreesTheReplicasBuffer", "FreesReducedOutputs")),
    ],
)
def test_streams_of_a_hybrid_wait(trial: Trial, reduce_dtype: torch.dtype | None) -> None:
    _holds(trial, replace(HYBRID, reduce_dtype=reduce_dtype))


@not_on_cuda
@pytest.mark.kills("GathersBeforeTheCopyIn", "ReducesBeforeGradientsAreThere", "ReducesBeforeTheCut")
@pytest.mark.worlds(SEVERAL)
def test_streams_wait_around_frozen_parameters(trial: Trial) -> None:
    _holds(trial, replace(NATIVE, units=FROZEN.units), problem=FROZEN)


@not_on_cuda
@pytest.mark.kills("GathersBeforeTheCopyIn", "ReducesBeforeGradientsAreThere", "ReducesBeforeTheCut")
@pytest.mark.worlds(SEVERAL)
@pytest.mark.parametrize(
    ("layout", "accumulation"),
    [
        param(
            Layout.SHARD, Accumulation.EVERY_MICROBATCH, id="shard-every", kills="EndsBackwardWithoutAWait"
        ),
        pytest.param(Layout.SHARD, Accumulation.LAST_MICROBATCH, id="shard-last"),
        pytest.param(Layout.HYBRID, Accumulation.EVERY_MICROBATCH, id="hybrid-every", marks=of_four),
        pytest.param(Layout.HYBRID, Accumulation.LAST_MICROBATCH, id="hybrid-last", marks=of_four),
    ],
)
def test_streams_wait_over_microbatches(trial: Trial, layout: Layout, accumulation: Accumulation) -> None:
    plan = replace(NATIVE, layout=layout, accumulation=accumulation)
    _holds(trial, plan, schedule=Schedule(microbatches=3))


@not_on_cuda
@pytest.mark.kills("CopiesOutDuringTheGather", "FreesTheGatherOutput", "FreesTheCopiedBuffer")
@pytest.mark.worlds(SEVERAL)
@pytest.mark.parametrize("distance", [1, 2])
def test_streams_of_prefetched_units_wait(trial: Trial, distance: int) -> None:
    ahead = Prefetch.by_distance(CHAIN.units, forward=distance, backward=distance)
    _holds(trial, replace(SHARDED, prefetch=ahead))


@not_on_cuda
@pytest.mark.kills("GathersWhileTheStepWrites", "GathersBeforeTheEventOfTheStep")
@pytest.mark.worlds(SEVERAL)
def test_gathers_wait_for_the_event_of_the_step(trial: Trial) -> None:
    _holds(trial, replace(SHARDED, demands=frozenset({Capability.STEP_EVENT})))


@not_on_cuda
@pytest.mark.kills("FreesTheReduceInput")
@pytest.mark.worlds(SEVERAL)
def test_streams_wait_with_several_reductions_in_flight(trial: Trial) -> None:
    _holds(trial, replace(SHARDED, max_reduce_buffers=3))


@not_on_cuda
@pytest.mark.kills("ReadsAnAsyncGatherUnderWay", "GathersByHandBeforeTheWrite")
@pytest.mark.worlds(SEVERAL)
def test_streams_wait_for_gathers_by_hand(trial: Trial) -> None:
    script = UnshardByHand(units=CHAIN.units, gather=Gather.UNAWAITED)
    plan = replace(SHARDED, demands=script.demands | {Capability.ASYNC_GATHER})
    _holds(trial, plan, script=script)


@not_on_cuda
@pytest.mark.kills("ReducesBeforeGradientsAreThere", "ReducesBeforeTheCut")
@pytest.mark.worlds(SEVERAL)
def test_streams_wait_around_a_dtype_for_reductions(trial: Trial) -> None:
    """What was reduced is cast, and let go, on the stream that comes last."""
    _holds(trial, replace(SHARDED, reduce_dtype=torch.bfloat16))


@not_on_cuda
@pytest.mark.kills("CopiesOutDuringTheGather", "FreesTheCopiedBuffer")
@pytest.mark.worlds(SEVERAL)
def test_streams_wait_where_forwards_wait_for_their_backwards(trial: Trial) -> None:
    """What a backward gathered ahead and did not use is memory again for the gathers of the next one."""
    script = AllForwardsFirst(backwards=Backwards.ONE_BY_ONE)
    training = train(
        MLP_UNEVEN, layout=Layout.SHARD, microbatches=2, script=script, watch=frozenset({Watch.RACES})
    )
    trial.holds(training, *LAWS)


def _holds(
    trial: Trial,
    plan: Plan,
    problem: Problem = CHAIN,
    schedule: Schedule | None = None,
    script: Script | None = None,
) -> None:
    training = Training(
        problem=problem,
        optimizer=SGD,
        plan=plan,
        schedule=schedule or Schedule(),
        script=script or EachMicrobatch(),
        watch=frozenset({Watch.RACES}),
    )
    trial.holds(training, *LAWS)
