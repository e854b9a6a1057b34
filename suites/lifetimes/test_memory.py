"""Which units are gathered when, the peak memory of that, and the memory that is left afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardproof import (
    FOUR_OR_MORE_EVEN,
    SEVERAL,
    TOGETHER,
    Accumulation,
    AfterPhase,
    Between,
    Capability,
    EachMicrobatch,
)
from shardproof import Exactly, Grouping, HoldsOn, Law, Layout, LeavesNothingBehind, LiveBytes, MemoryKind
from shardproof import (
    NamedOptimizer,
    Offload,
    PeakBytes,
    Phase,
    Plan,
    Prefetch,
    Problem,
    Reshard,
    Schedule,
    Script,
    Training,
)
from shardproof import Trial, UnshardedOnlyInTurn, UserTensorsLive, Watch, ZeroGrad
from shardproof.fixtures.chain import CHAIN, CHECKPOINTED_CHAIN, LAVISH_CHAIN
from shardproof.fixtures.experts import MIXTURE
from shardproof.fixtures.buffered import HOARD
from shardproof.fixtures.optimizers import ADAMW, SGD
from shardproof.suites.closed_forms import ACCUMULATED_MOST, ALL_LEAST, ALL_MOST, ALL_TWICE, BUFFERS_OF_THREE
from shardproof.suites.closed_forms import BUFFERS_OF_TWO, ONE_LEAST, PARTS_AND_LAST_LEAST, PARTS_AND_ONE_MOST
from shardproof.suites.closed_forms import ROOT_AND_ONE_LEAST, ROOT_AND_ONE_MOST, ROOT_AND_TWO_MOST
from shardproof.suites.params import param, parametrize
from shardproof.suites.vocabulary import PARITY

GATHERED, STAGING, GRADIENT = (MemoryKind.GATHERED,), (MemoryKind.STAGING,), (MemoryKind.GRADIENT,)
UNREDUCED = (MemoryKind.GRADIENT, MemoryKind.STAGING)  # a flat gradient is packed as it is computed
FREED = Plan(
    layout=Layout.SHARD, units=CHAIN.units, grouping=Grouping.REQUIRED, reshard=Reshard.AFTER_FORWARD
)
KEPT = replace(FREED, reshard=Reshard.KEEP)
PAIRS = replace(FREED, reshard=Reshard.TO_PAIRS)
HYBRID = replace(FREED, layout=Layout.HYBRID)
ON_HOST = replace(FREED, offload=Offload.CPU)
JOINT = replace(
    FREED,
    units=("blocks.0,blocks.1", "blocks.2,blocks.3"),
    demands=frozenset({Capability.UNUSED}),
)
IN_BACKWARD = Schedule(steps_in_backward=True)
EXPERTS = Plan(
    layout=Layout.SHARD,
    expert_parallel=2,
    experts=tuple(f"{unit}.experts.{weight}" for unit in MIXTURE.units for weight in ("inward", "outward")),
    units=MIXTURE.units,
    grouping=Grouping.REQUIRED,
)
REPLICATED = Plan(layout=Layout.REPLICATE, units=CHAIN.units)
HELD_BACK = replace(FREED, accumulation=Accumulation.LAST_MICROBATCH)
AHEAD = replace(FREED, prefetch=Prefetch.by_distance(CHAIN.units, forward=2, backward=2))
ONE, THREE = Schedule(), Schedule(microbatches=3)
of_four = pytest.mark.worlds(FOUR_OR_MORE_EVEN)
of_buffers = pytest.mark.kills("KeepsGatherOutputs")
of_a_pass = pytest.mark.kills("KeepsUnitsUntilBackwardEnds")


@of_a_pass
@pytest.mark.worlds(TOGETHER)
@parametrize(
    "plan, problem, schedule",
    param(FREED, CHAIN, ONE, id="freed", marks=of_buffers),
    param(KEPT, CHAIN, ONE, id="kept"),
    param(PAIRS, CHAIN, ONE, id="pairs", marks=of_four),
    param(HYBRID, CHAIN, ONE, id="hybrid", marks=of_four),
    param(FREED, CHECKPOINTED_CHAIN, ONE, id="checkpointed", marks=of_buffers),
    param(FREED, CHAIN, THREE, id="microbatches", marks=of_buffers),
    param(HELD_BACK, CHAIN, THREE, id="held-back"),
    param(AHEAD, CHAIN, ONE, id="prefetched"),
    param(ON_HOST, CHAIN, ONE, id="host", marks=of_buffers),
    param(FREED, CHAIN, IN_BACKWARD, id="optimizer-in-backward", marks=of_buffers),
)
def test_units_are_gathered_in_turn(trial: Trial, plan: Plan, problem: Problem, schedule: Schedule) -> None:
    ahead = 1 if plan.prefetch is None else 2
    keeps = plan.reshard in {Reshard.KEEP, Reshard.TO_PAIRS}
    _holds(
        trial,
        plan,
        UnshardedOnlyInTurn(phase=Phase.FORWARD, ahead=ahead, keeps=keeps),
        UnshardedOnlyInTurn(phase=Phase.BACKWARD, ahead=ahead, keeps=keeps),
        problem=problem,
        schedule=schedule,
    )


@pytest.mark.worlds(SEVERAL)
@parametrize(
    "plan, left",
    param(
        FREED,
        Exactly(0),
        id="freed",
        kills=("KeepsWhatItWasAskedToFree", "KeepsRootsWhateverAsked", "FreesInTheFirstStepAlone"),
    ),
    param(KEPT, Between(ALL_LEAST, ALL_MOST), id="kept", kills="FreesWhatItWasAskedToKeep"),
    param(HYBRID, Exactly(0), id="hybrid", kills="KeepsWhatItWasAskedToFree", marks=of_four),
)
def test_the_policy_says_what_forward_leaves_gathered(
    trial: Trial, plan: Plan, left: Exactly | Between
) -> None:
    _holds(
        trial,
        plan,
        LiveBytes(kinds=GATHERED, after=AfterPhase.FORWARD, expected=left),
        schedule=Schedule(microbatches=2),
    )


@pytest.mark.kills("LeaksAfterBackward")
@pytest.mark.worlds(SEVERAL)
@parametrize(
    "plan",
    param(FREED, id="freed"),
    param(KEPT, id="kept"),
    param(PAIRS, id="pairs", marks=of_four),
    param(HYBRID, id="hybrid", marks=of_four),
    param(HELD_BACK, id="held-back"),
)
def test_backward_leaves_nothing_gathered(trial: Trial, plan: Plan) -> None:
    _holds(
        trial,
        plan,
        LiveBytes(kinds=GATHERED, after=AfterPhase.BACKWARD, expected=Exactly(0)),
        LiveBytes(kinds=GATHERED, after=AfterPhase.STEP, expected=Exactly(0)),
        schedule=Schedule(microbatches=2),
    )


@pytest.mark.worlds(SEVERAL)
@parametrize(
    "plan, forward, backward",
    param(
        FREED,
        Between(ROOT_AND_ONE_LEAST, ROOT_AND_ONE_MOST),
        Between(ROOT_AND_ONE_LEAST, ROOT_AND_TWO_MOST),
        id="freed",
        marks=of_a_pass,
    ),
    param(
        KEPT,
        Between(ALL_LEAST, ALL_MOST),
        Between(ALL_LEAST, ALL_MOST),
        id="kept",
        kills="FreesWhatItWasAskedToKeep",
    ),
    param(
        PAIRS,
        Between(PARTS_AND_LAST_LEAST, PARTS_AND_ONE_MOST),
        Between(PARTS_AND_LAST_LEAST, PARTS_AND_ONE_MOST),
        id="pairs",
        kills="FreesWholeWhereAPartWasAsked",
        marks=of_four,
    ),
    param(
        HYBRID,
        Between(ROOT_AND_ONE_LEAST, ROOT_AND_ONE_MOST),
        Between(ROOT_AND_ONE_LEAST, ROOT_AND_TWO_MOST),
        id="hybrid",
        marks=[of_four, of_a_pass],
    ),
)
def test_parameters_take_the_memory_of_those_in_turn(
    trial: Trial, plan: Plan, forward: Between, backward: Between
) -> None:
    _holds(
        trial,
        plan,
        PeakBytes(kinds=GATHERED, phase=Phase.FORWARD, expected=forward),
        PeakBytes(kinds=GATHERED, phase=Phase.BACKWARD, expected=backward),
    )


@pytest.mark.kills("KeepsGatherOutputs")
@pytest.mark.worlds(TOGETHER)
@parametrize("plan", FREED, KEPT, ids=["freed", "kept"])
def test_buffers_are_those_of_neighbours(trial: Trial, plan: Plan) -> None:
    _holds(
        trial,
        plan,
        PeakBytes(kinds=STAGING, phase=Phase.FORWARD, expected=Between(0, BUFFERS_OF_TWO)),
        PeakBytes(kinds=STAGING, phase=Phase.BACKWARD, expected=Between(ONE_LEAST, BUFFERS_OF_THREE)),
    )


@pytest.mark.kills("KeepsWholeGradients")
@pytest.mark.worlds(SEVERAL)
@parametrize(
    "plan, problem",
    param(FREED, CHAIN, id="shard"),
    param(HYBRID, CHAIN, id="hybrid", marks=of_four),
    param(JOINT, LAVISH_CHAIN, id="some-unused", kills="ReducesIncompleteJointUnitsLast"),
)
def test_gradients_go_once_they_are_packed(trial: Trial, plan: Plan, problem: Problem) -> None:
    _holds(
        trial,
        plan,
        PeakBytes(kinds=GRADIENT, phase=Phase.BACKWARD, expected=Between(ONE_LEAST, ROOT_AND_ONE_MOST)),
        problem=problem,
        schedule=THREE,
    )


@pytest.mark.kills("ReducesDespiteNoSync")
@pytest.mark.worlds(TOGETHER)
def test_gradients_are_held_back_once(trial: Trial) -> None:
    _holds(
        trial,
        HELD_BACK,
        PeakBytes(kinds=UNREDUCED, phase=Phase.BETWEEN, expected=Between(ALL_LEAST, ALL_MOST)),
        PeakBytes(kinds=GRADIENT, phase=Phase.BACKWARD, expected=Between(ONE_LEAST, ACCUMULATED_MOST)),
        schedule=THREE,
    )


@pytest.mark.kills("PilesUpGradients")
@pytest.mark.worlds(TOGETHER)
def test_gradients_of_replicas_exist_twice_at_most(trial: Trial) -> None:
    """As they are computed and as they are reduced, or in a bucket and beside it."""
    gradients = (*UNREDUCED, MemoryKind.REDUCED)
    _holds(
        trial,
        REPLICATED,
        PeakBytes(kinds=gradients, phase=Phase.BACKWARD, expected=Between(ALL_LEAST, ALL_TWICE)),
        PeakBytes(kinds=GATHERED, phase=Phase.FORWARD, expected=Between(0, ALL_MOST)),
    )


@pytest.mark.kills("PilesUpGradients")
@pytest.mark.worlds(TOGETHER)
@parametrize(
    "plan, problem, optimizer, schedule",
    param(FREED, CHAIN, SGD, ONE, id="shard"),
    param(KEPT, CHAIN, ADAMW, ONE, id="kept-adamw"),
    param(PAIRS, CHAIN, SGD, ONE, id="pairs", marks=of_four),
    param(HYBRID, CHAIN, SGD, ONE, id="hybrid", marks=of_four),
    param(REPLICATED, CHAIN, SGD, ONE, id="replicate"),
    param(FREED, CHECKPOINTED_CHAIN, SGD, ONE, id="checkpointed"),
    param(HELD_BACK, CHAIN, SGD, THREE, id="held-back"),
    param(ON_HOST, CHAIN, ADAMW, ONE, id="host"),
    param(FREED, CHAIN, SGD, IN_BACKWARD, id="optimizer-in-backward"),
    param(EXPERTS, MIXTURE, SGD, ONE, id="experts", marks=of_four),
)
def test_no_step_leaves_more_than_the_one_before(
    trial: Trial, plan: Plan, problem: Problem, optimizer: NamedOptimizer, schedule: Schedule
) -> None:
    schedule = replace(schedule, steps=5, zero_grad=ZeroGrad.SET_TO_NONE)
    training = Training(problem=problem, optimizer=optimizer, plan=plan, schedule=schedule)
    trial.holds(training, LeavesNothingBehind(), *PARITY)


@pytest.mark.kills("FreesTheUsersOutputs")
@pytest.mark.worlds(SEVERAL)
@parametrize("layout", Layout.NATIVE, Layout.REPLICATE)
def test_what_the_user_holds_is_let_alone(trial: Trial, layout: Layout) -> None:
    units = ("blocks.0", "blocks.2")
    names = ("an input", "an output", "an activation", "a slice of an input")
    _holds(
        trial,
        Plan(layout=layout, units=CHAIN.units),
        UserTensorsLive(at_least=names),
        schedule=Schedule(microbatches=2),
        script=HoldsOn(units=units),
    )


@pytest.mark.kills("MovesWhatItWasToLeave")
@pytest.mark.worlds(SEVERAL)
def test_buffers_and_ignored_parameters_are_let_alone(trial: Trial) -> None:
    _holds(
        trial,
        Plan(layout=Layout.SHARD, units=HOARD.units, ignored=HOARD.idle),
        UserTensorsLive(at_least=("buffer 'offset'", "the ignored parameter 'scale'")),
        problem=HOARD,
    )


def _holds(
    trial: Trial,
    plan: Plan,
    *laws: Law,
    problem: Problem = CHAIN,
    schedule: Schedule = ONE,
    script: Script | None = None,
) -> None:
    training = Training(
        problem=problem,
        optimizer=SGD,
        plan=plan,
        schedule=replace(schedule, zero_grad=ZeroGrad.SET_TO_NONE),
        script=script or EachMicrobatch(),
        watch=frozenset({Watch.LIFETIMES}),
    )
    trial.holds(training, *laws, *PARITY)
