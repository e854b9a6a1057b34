"""State handed to a fresh model, under the same layout or another, and trained on as if nothing had been."""

from __future__ import annotations

from operator import attrgetter

import pytest

from shardproof import (
    EVEN,
    LOADED,
    SEVERAL,
    UNCHANGED,
    Capability,
    Layout,
    MatchesOracle,
    NamedOptimizer,
    Notes,
    Plan,
    Problem,
    RanksAgree,
    Resume,
    Schedule,
    Training,
    Trial,
)
from shardproof.fixtures.optimizers import ADAMW, SGD
from shardproof.fixtures.problems import MLP_BUFFERS, MLP_EVEN, MLP_UNEVEN
from shardproof.fixtures.tied import TIED

LAWS = (MatchesOracle(), RanksAgree())


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(
            SGD,
            id="sgd",
            marks=pytest.mark.kills("LosesOptimizerState", "PermutesOptimizerState", "LoadsNoParameters"),
        ),
        pytest.param(
            ADAMW,
            id="adamw",
            marks=pytest.mark.kills(
                "ResetsTheStepCount", "StartsAdamAtStepOne", "StepsOldParametersAfterAResume"
            ),
        ),
    ],
)
def test_resumes_as_it_was(trial: Trial, optimizer: NamedOptimizer) -> None:
    """Units of equal shapes: the state of one fits another."""
    trial.holds(_training(MLP_EVEN, optimizer, Layout.NATIVE, Layout.NATIVE), *LAWS)


@pytest.mark.worlds(EVEN)
@pytest.mark.kills("LosesOptimizerState")
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=attrgetter("name"))
def test_resumes_on_two_replicas_what_all_ranks_shared(trial: Trial, optimizer: NamedOptimizer) -> None:
    """Shards over n ranks become shards over n / 2: what a change of world size asks of a state."""
    trial.holds(_training(MLP_UNEVEN, optimizer, Layout.SHARD, Layout.HYBRID), *LAWS)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("LosesStateOfOtherRanks", "FailsToLoadEmptyShards")
def test_resumes_in_shards_what_was_replicated(trial: Trial) -> None:
    trial.holds(_training(MLP_UNEVEN, ADAMW, Layout.REPLICATE, Layout.SHARD), *LAWS)


@pytest.mark.kills("LosesOptimizerState")
def test_resumes_tied_parameters(trial: Trial) -> None:
    trial.holds(_training(TIED, ADAMW, Layout.NATIVE, Layout.NATIVE), *LAWS)


@pytest.mark.kills("LoadsNoBuffers")
def test_resumes_buffers_where_they_were(trial: Trial) -> None:
    """Each forward changes them, and the loss depends on them."""
    trial.holds(_training(MLP_BUFFERS, SGD, Layout.NATIVE, Layout.NATIVE), *LAWS)


@pytest.mark.kills("EmptiesWhatItLoads")
def test_leaves_what_it_loads_as_it_was(trial: Trial) -> None:
    """The same state may be loaded again, or be saved."""
    training = _training(MLP_EVEN, SGD, Layout.NATIVE, Layout.NATIVE)
    assert training.resume is not None
    trial.holds(training, *LAWS, Notes(subject=LOADED, value=UNCHANGED, step=training.resume.after_steps))


def _training(problem: Problem, optimizer: NamedOptimizer, before: Layout, after: Layout) -> Training:
    demands = frozenset({Capability.STATE})
    plans = [Plan(layout=layout, units=problem.units, demands=demands) for layout in (before, after)]
    return Training(
        problem=problem,
        optimizer=optimizer,
        plan=plans[0],
        schedule=Schedule(steps=4),
        resume=Resume(after_steps=2, plan=plans[1]),
    )
