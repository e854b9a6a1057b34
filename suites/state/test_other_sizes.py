"""State that a world of another size saved: training continues as on the ranks that saved it."""

from __future__ import annotations

import pytest

from shardproof import Accumulation, Clip, Layout, NamedOptimizer, Plan, Problem
from shardproof import RanksBefore, StateForm, Trial
from shardproof.fixtures.optimizers import ADAMW, SGD
from shardproof.fixtures.problems import MLP_BUFFERS, MLP_EVEN, MLP_UNEVEN
from shardproof.fixtures.decoders import TIED
from shardproof.suites.params import parametrize
from shardproof.suites.state.worlds_before import WORLDS_BEFORE, saved_by
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY


@pytest.mark.kills("LosesStateInAnotherWorld", "AlignsStateForTheWorldBefore")
@parametrize("optimizer", SGD, ADAMW)
@parametrize("ranks", *WORLDS_BEFORE)
def test_goes_on_from_whole_tensors(trial: Trial, ranks: RanksBefore, optimizer: NamedOptimizer) -> None:
    """The first of other ranks wrote them, and each rank loads its part of them."""
    origin = saved_by(ranks, StateForm.WHOLE)
    trial.holds(train(MLP_UNEVEN, optimizer, origin=origin), *PARITY)


@pytest.mark.kills("ReadsTheFileOfItsRank")
@parametrize("problem", MLP_UNEVEN, MLP_EVEN, TIED)
@parametrize("ranks", *WORLDS_BEFORE)
def test_goes_on_from_files(trial: Trial, ranks: RanksBefore, problem: Problem) -> None:
    """Each of other ranks wrote its shares; a rank's shares now are in several files, or in a part of one."""
    origin = saved_by(ranks, StateForm.FILES)
    trial.holds(train(problem, ADAMW, origin=origin), *PARITY)


@pytest.mark.kills("ReadsTheFileOfItsRank")
@parametrize(
    "before, after",
    (Layout.SHARD, Layout.REPLICATE),
    (Layout.REPLICATE, Layout.SHARD),
    ids=["joined", "split"],
)
@parametrize("ranks", *WORLDS_BEFORE)
def test_goes_on_from_files_under_another_layout(
    trial: Trial, ranks: RanksBefore, before: Layout, after: Layout
) -> None:
    plan = Plan(units=MLP_UNEVEN.units, layout=before)
    origin = saved_by(ranks, StateForm.FILES, plan)
    trial.holds(train(MLP_UNEVEN, ADAMW, origin=origin, layout=after), *PARITY)


@pytest.mark.kills("LosesStateInAnotherWorld")
@parametrize("ranks", *WORLDS_BEFORE)
def test_goes_on_beside_accumulation_and_clipping(trial: Trial, ranks: RanksBefore) -> None:
    """The engine's state of a step is by then reduced over other ranks."""
    origin = saved_by(ranks, StateForm.WHOLE)
    training = train(MLP_UNEVEN, SGD, microbatches=2, clip=Clip(max_norm=0.5), origin=origin)
    trial.holds(training, *PARITY)


@pytest.mark.kills("LosesStateInAnotherWorld")
@parametrize("ranks", *WORLDS_BEFORE)
def test_goes_on_with_the_divisor_of_its_own_world(trial: Trial, ranks: RanksBefore) -> None:
    """The mean is over the current ranks, also with every microbatch reduced separately."""
    origin = saved_by(ranks, StateForm.WHOLE)
    training = train(MLP_EVEN, SGD, microbatches=2, accumulation=Accumulation.EVERY_MICROBATCH, origin=origin)
    trial.holds(training, *PARITY)


@pytest.mark.kills("LoadsNoBuffers")
@parametrize("ranks", *WORLDS_BEFORE)
def test_goes_on_with_the_buffers_of_the_first_rank(trial: Trial, ranks: RanksBefore) -> None:
    origin = saved_by(ranks, StateForm.WHOLE)
    trial.holds(train(MLP_BUFFERS, SGD, origin=origin), *PARITY)
