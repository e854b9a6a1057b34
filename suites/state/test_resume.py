"""State handed to a fresh model, under the same layout or another, and trained on as if nothing had been."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

import pytest

from shardproof import (
    EVEN,
    FOUR_OR_MORE_EVEN,
    FOURS,
    LOADED,
    SEVERAL,
    UNCHANGED,
    Layout,
    MatchesOracle,
    NamedOptimizer,
    Notes,
    Plan,
    Problem,
    RanksAgree,
    Resume,
    Schedule,
    StateForm,
    Training,
    Trial,
)
from shardproof.fixtures.optimizers import ADAMW, SGD
from shardproof.fixtures.problems import MLP_BUFFERS, MLP_EVEN, MLP_UNEVEN
from shardproof.fixtures.tensor_parallel import STACK_5, STACK_16
from shardproof.fixtures.tied import TIED

LAWS = (MatchesOracle(), RanksAgree())
LAYOUTS_OF_FOUR = [
    pytest.param(Layout.SHARD, id="shard"),
    pytest.param(Layout.REPLICATE, id="replicate"),
    pytest.param(Layout.HYBRID, id="hybrid", marks=pytest.mark.worlds(FOURS)),
]


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


@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
@pytest.mark.kills("LosesStateOfOtherRanks")
@pytest.mark.parametrize("problem", [STACK_16, STACK_5], ids=attrgetter("name"))
@pytest.mark.parametrize("layout", LAYOUTS_OF_FOUR)
def test_resumes_tensors_that_are_cut(trial: Trial, problem: Problem, layout: Layout) -> None:
    trial.holds(_training(problem, ADAMW, layout, layout, tensor_parallel=2), *LAWS)


@pytest.mark.worlds(EVEN)
@pytest.mark.kills("LosesStateOfOtherRanks")
@pytest.mark.parametrize("form", [StateForm.SHARES, StateForm.FILES], ids=lambda form: form.name.lower())
@pytest.mark.parametrize("layout", [Layout.SHARD, Layout.HYBRID], ids=lambda layout: layout.name.lower())
def test_resumes_from_shares(trial: Trial, layout: Layout, form: StateForm) -> None:
    trial.holds(_training(MLP_UNEVEN, ADAMW, layout, layout, form=form), *LAWS)


@pytest.mark.worlds(EVEN)
@pytest.mark.kills("LosesStateOfOtherRanks")
@pytest.mark.parametrize(
    ("before", "after"),
    [(Layout.SHARD, Layout.HYBRID), (Layout.HYBRID, Layout.SHARD)],
    ids=["split", "joined"],
)
def test_resumes_from_files_of_another_layout(trial: Trial, before: Layout, after: Layout) -> None:
    trial.holds(_training(MLP_UNEVEN, ADAMW, before, after, form=StateForm.FILES), *LAWS)


@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
@pytest.mark.kills("LosesStateOfOtherRanks")
@pytest.mark.parametrize("form", [StateForm.SHARES, StateForm.FILES], ids=lambda form: form.name.lower())
@pytest.mark.parametrize("layout", LAYOUTS_OF_FOUR)
def test_resumes_from_shares_of_tensors_that_are_cut(trial: Trial, layout: Layout, form: StateForm) -> None:
    trial.holds(_training(STACK_16, ADAMW, layout, layout, tensor_parallel=2, form=form), *LAWS)


@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
@pytest.mark.kills("LosesStateOfOtherRanks")
@pytest.mark.parametrize("layout", LAYOUTS_OF_FOUR)
def test_the_same_model_goes_on_from_files(trial: Trial, layout: Layout) -> None:
    trial.holds(_training(STACK_16, ADAMW, layout, None, tensor_parallel=2, form=StateForm.FILES), *LAWS)


def _training(
    problem: Problem,
    optimizer: NamedOptimizer,
    before: Layout,
    after: Layout | None,
    *,
    form: StateForm = StateForm.WHOLE,
    tensor_parallel: int = 1,
) -> Training:
    plan = Plan(units=problem.units, tensor_parallel=tensor_parallel, demands=form.demands)
    later = None if after is None else replace(plan, layout=after)
    return Training(
        problem=problem,
        optimizer=optimizer,
        plan=replace(plan, layout=before),
        schedule=Schedule(steps=4),
        resume=Resume(after_steps=2, plan=later, form=form),
    )
