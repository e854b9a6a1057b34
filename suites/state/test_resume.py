"""State loaded into a fresh model, under the same layout or another, which continues as if uninterrupted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardproof import EVEN, FOURS, FOUR_OR_MORE_EVEN, LOADED, SEVERAL, UNCHANGED, Capability, Layout
from shardproof import (
    NamedOptimizer,
    Notes,
    Plan,
    Problem,
    Refusal,
    Resume,
    Schedule,
    StateForm,
    Training,
    Trial,
    ZeroGrad,
)
from shardproof.fixtures.idle import SOMETIMES
from shardproof.fixtures.optimizers import ADAMW, DECAYING, EMPTY_GROUP, GROUPED, SCHEDULED, SGD
from shardproof.fixtures.problems import MLP_EVEN, MLP_UNEVEN
from shardproof.fixtures.refused import BY_COLUMNS
from shardproof.fixtures.tensor_parallel import STACK_16, STACK_5
from shardproof.fixtures.decoders import TIED
from shardproof.fixtures.thin import ONE_NUMBER
from shardproof.suites.params import param, parametrize
from shardproof.suites.vocabulary import PARITY

AFTER_STEPS = 2
LAYOUTS_OF_FOUR = [Layout.SHARD, Layout.REPLICATE, param(Layout.HYBRID, worlds=FOURS)]


@parametrize(
    "optimizer",
    param(SGD, kills=("LosesOptimizerState", "LoadsNoParameters")),
    param(ADAMW, kills=("StartsAdamAtStepOne", "LoadsTheRandomNumbersOfTheFirst")),
    param(DECAYING, kills="RestartsTheLearningRate"),
)
def test_resumes_as_it_was(trial: Trial, optimizer: NamedOptimizer) -> None:
    """Units of equal shapes: the state of one fits another."""
    trial.holds(_training(MLP_EVEN, optimizer, Layout.NATIVE, Layout.NATIVE), *PARITY)


@pytest.mark.kills("TakesAStepWhereNoneWasSaved")
def test_resumes_before_the_first_step(trial: Trial) -> None:
    """The optimizer has no state yet, before and after; Adam's counts steps."""
    trial.holds(_training(MLP_EVEN, ADAMW, Layout.NATIVE, Layout.NATIVE, after_steps=0), *PARITY)


@pytest.mark.worlds(EVEN)
@pytest.mark.kills("LosesOptimizerState")
@parametrize("optimizer", SGD, ADAMW)
def test_resumes_on_two_replicas_what_all_ranks_shared(trial: Trial, optimizer: NamedOptimizer) -> None:
    """Shards over n ranks become shards over n / 2, as in a change of world size."""
    trial.holds(_training(MLP_UNEVEN, optimizer, Layout.SHARD, Layout.HYBRID), *PARITY)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("LosesStateOfOtherRanks", "FailsToLoadEmptyShards")
def test_resumes_in_shards_what_was_replicated(trial: Trial) -> None:
    trial.holds(_training(MLP_UNEVEN, ADAMW, Layout.REPLICATE, Layout.SHARD), *PARITY)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("GathersNoStateFromEmptyRanks")
def test_resumes_where_one_rank_owns_everything(trial: Trial) -> None:
    trial.holds(_training(ONE_NUMBER, ADAMW, Layout.NATIVE, Layout.NATIVE), *PARITY)


@pytest.mark.kills("SavesUnderNamesOfItsOwn", "SavesMomentsInAnOrderOfItsOwn")
@parametrize("optimizer", SGD, ADAMW)
def test_hands_out_what_the_ranks_hold(trial: Trial, optimizer: NamedOptimizer) -> None:
    """The state is whole and has the model's own names, so any number of ranks may load it."""
    training = _training(MLP_EVEN, optimizer, Layout.NATIVE, Layout.NATIVE)
    trial.holds(training, *PARITY)


@pytest.mark.kills("RoundsWhatItLoads")
@parametrize("optimizer", SGD, ADAMW)
def test_resumes_what_computes_in_few_bits(trial: Trial, optimizer: NamedOptimizer) -> None:
    """Float32 values stay float32: they are not rounded to the compute dtype, neither way."""
    dtypes: dict[str, Any] = {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    trial.holds(_training(MLP_EVEN, optimizer, Layout.NATIVE, Layout.NATIVE, **dtypes), *PARITY)


@pytest.mark.kills("LosesOptimizerState")
def test_resumes_tied_parameters(trial: Trial) -> None:
    trial.holds(_training(TIED, ADAMW, Layout.NATIVE, Layout.NATIVE), *PARITY)


@pytest.mark.kills("LosesOptimizerState")
@parametrize("after_steps", 2, 3)
def test_resumes_beside_what_nothing_used(trial: Trial, after_steps: int) -> None:
    """A parameter without any gradient so far has no optimizer state, before and after.

    In a fresh model its gradient is None, even if the previous step left zeros, as the second one does.
    """
    demands = frozenset({Capability.UNUSED})
    training = _training(
        SOMETIMES, ADAMW, Layout.NATIVE, Layout.NATIVE, after_steps=after_steps, demands=demands
    )
    trial.holds(training, *PARITY)


@pytest.mark.kills("ReceivesColumnsAsRows")
def test_resumes_what_lies_by_columns(trial: Trial) -> None:
    """The moments of a weight that lies column by column in memory do so too; not every engine takes one."""
    training = _training(BY_COLUMNS, ADAMW, Layout.NATIVE, Layout.NATIVE)
    trial.holds(training, *PARITY, refusal=Refusal.ALLOWED)


@pytest.mark.kills("EmptiesWhatItLoads")
def test_leaves_what_it_loads_as_it_was(trial: Trial) -> None:
    """The same state may be loaded again, or be saved."""
    training = _training(MLP_EVEN, SGD, Layout.NATIVE, Layout.NATIVE)
    trial.holds(training, *PARITY, Notes(subject=LOADED, value=UNCHANGED, step=AFTER_STEPS))


@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
@pytest.mark.kills("LosesStateOfOtherRanks")
@parametrize("problem", STACK_16, STACK_5)
@parametrize("layout", *LAYOUTS_OF_FOUR)
def test_resumes_tensors_that_are_cut(trial: Trial, problem: Problem, layout: Layout) -> None:
    trial.holds(_training(problem, ADAMW, layout, layout, tensor_parallel=2), *PARITY)


@pytest.mark.worlds(EVEN)
@pytest.mark.kills("LosesStateOfOtherRanks")
@parametrize("form", StateForm.SHARES, StateForm.FILES)
@parametrize("layout", Layout.SHARD, Layout.HYBRID)
def test_resumes_from_shares(trial: Trial, layout: Layout, form: StateForm) -> None:
    trial.holds(_training(MLP_UNEVEN, ADAMW, layout, layout, form=form), *PARITY)


@parametrize(
    "optimizer",
    param(GROUPED, kills=("MergesParameterGroupsItLoads", "LoadsNoOptionsOfTheLoop", "LoadsNoWeightDecay")),
    param(EMPTY_GROUP, kills="LosesOptionsBesideAnEmptyGroup"),
)
def test_resumes_several_parameter_groups(trial: Trial, optimizer: NamedOptimizer) -> None:
    """Each group keeps its options and members, and an empty one its options."""
    demands = frozenset({Capability.PARAMETER_SHAPES})
    trial.holds(_training(MLP_UNEVEN, optimizer, Layout.NATIVE, Layout.NATIVE, demands=demands), *PARITY)


@pytest.mark.kills("LosesOptionsBesideAnEmptyGroup")
@parametrize("form", StateForm.SHARES, StateForm.FILES)
def test_resumes_an_empty_parameter_group_from_shares(trial: Trial, form: StateForm) -> None:
    demands = frozenset({Capability.PARAMETER_SHAPES})
    training = _training(MLP_UNEVEN, EMPTY_GROUP, Layout.SHARD, Layout.SHARD, form=form, demands=demands)
    trial.holds(training, *PARITY)


@pytest.mark.worlds(EVEN)
@pytest.mark.kills("RestartsTheLearningRate")
@parametrize("form", StateForm.SHARES, StateForm.FILES)
def test_resumes_a_schedule_from_shares(trial: Trial, form: StateForm) -> None:
    """The optimizer has changed its learning rate, and continues from there."""
    trial.holds(_training(MLP_UNEVEN, DECAYING, Layout.SHARD, Layout.SHARD, form=form), *PARITY)


@pytest.mark.worlds(EVEN)
@pytest.mark.kills("LosesStateOfOtherRanks")
@parametrize(
    "before, after", (Layout.SHARD, Layout.HYBRID), (Layout.HYBRID, Layout.SHARD), ids=["split", "joined"]
)
def test_resumes_from_files_of_another_layout(trial: Trial, before: Layout, after: Layout) -> None:
    trial.holds(_training(MLP_UNEVEN, ADAMW, before, after, form=StateForm.FILES), *PARITY)


@pytest.mark.kills("LoadsOnlyTheOptionsThatItKnows")
@parametrize("form", StateForm.WHOLE, StateForm.SHARES)
def test_loads_before_it_schedules(trial: Trial, form: StateForm) -> None:
    """A schedule that goes on needs ``initial_lr``, which the state has and the new optimizer has not yet."""
    demands = frozenset({Capability.PARAMETER_SHAPES})  # groups go by the dimensions
    training = _training(MLP_UNEVEN, SCHEDULED, Layout.NATIVE, Layout.NATIVE, form=form, demands=demands)
    assert training.resume is not None
    trial.holds(replace(training, resume=replace(training.resume, schedules_later=True)), *PARITY)


@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
@pytest.mark.kills("LosesStateOfOtherRanks")
@parametrize("form", StateForm.SHARES, StateForm.FILES)
@parametrize("layout", *LAYOUTS_OF_FOUR)
def test_resumes_from_shares_of_tensors_that_are_cut(trial: Trial, layout: Layout, form: StateForm) -> None:
    trial.holds(_training(STACK_16, ADAMW, layout, layout, tensor_parallel=2, form=form), *PARITY)


@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
@pytest.mark.kills("LosesStateOfOtherRanks")
@parametrize("layout", *LAYOUTS_OF_FOUR)
def test_the_same_model_goes_on_from_files(trial: Trial, layout: Layout) -> None:
    """Its gradients are None then: beside zeros torch's functions make no state to load into."""
    training = _training(STACK_16, ADAMW, layout, None, tensor_parallel=2, form=StateForm.FILES)
    schedule = replace(training.schedule, zero_grad=ZeroGrad.SET_TO_NONE)
    trial.holds(replace(training, schedule=schedule), *PARITY)


def _training(
    problem: Problem,
    optimizer: NamedOptimizer,
    before: Layout,
    after: Layout | None,
    *,
    form: StateForm = StateForm.WHOLE,
    after_steps: int = AFTER_STEPS,
    demands: frozenset[Capability] = frozenset(),
    **options: Any,  # of the plan, by the names of its fields
) -> Training:
    plan = Plan(units=problem.units, demands=demands, **options)
    later = None if after is None else replace(plan, layout=after)
    return Training(
        problem=problem,
        optimizer=optimizer,
        plan=replace(plan, layout=before),
        schedule=Schedule(steps=4),
        resume=Resume(after_steps=after_steps, plan=later, form=form),
    )
