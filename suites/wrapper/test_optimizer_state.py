"""The state of optimizers of wrapped models: by original names, and trained on as if nothing had been."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp import ShardingStrategy

from shardproof import SEVERAL, Trial
from suites.wrapper import saved_optimizers
from suites.wrapper.exercised import hold
from suites.wrapper.saved_optimizers import Kind, Route
from suites.wrapper.specimens import Form, Wrapping

SHARDS, FLAT = Wrapping(), Wrapping(form=Form.FLAT)
FLAT_HEAD = Wrapping(form=Form.FLAT, units=("head",))
KEPT = Wrapping(strategy=ShardingStrategy.SHARD_GRAD_OP)
WHOLE = Wrapping(strategy=ShardingStrategy.NO_SHARD)
WHOLE_FLAT = Wrapping(strategy=ShardingStrategy.NO_SHARD, form=Form.FLAT)
OTHER_UNITS = Wrapping(units=("head",))
HYBRID = Wrapping(strategy=ShardingStrategy.HYBRID_SHARD)
MESH, MESH_ROOT = Wrapping(by_mesh=True), Wrapping(by_mesh=True, units=())
SGD, ADAMW = Kind.SGD, Kind.ADAMW
RESUMED = "parameters afterwards"
LOSSES = pytest.mark.kills("LosesMomentum")
STEPS = pytest.mark.kills("RestartsTheCountOfSteps")
KINDS = pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name.lower())


@KINDS
@pytest.mark.api("optim_state_dict", "FullOptimStateDictConfig")
@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("NamesTheWrapperInOptimizerStates", "LosesMomentumWhenItSaves")
@pytest.mark.parametrize("wrapping", [SHARDS, FLAT, WHOLE, HYBRID], ids=str)
def test_saves_state_as_if_nobody_had_wrapped_the_model(trial: Trial, kind: Kind, wrapping: Wrapping) -> None:
    subjects = ("whose state it is", "the state", "the names of the group", "the options of the group")
    hold(trial, saved_optimizers.see_state, *subjects, arguments=(kind, wrapping))


@pytest.mark.api(
    "optim_state_dict", "full_optim_state_dict", "FullOptimStateDictConfig", "OptimStateDictConfig"
)
@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SavesOnEveryRank")
def test_gives_state_to_rank_0_alone(trial: Trial) -> None:
    subjects = (
        "what the rank is given",
        "what the rank is given by default",
        "what every rank is given",
        "elsewhere than on the host",
    )
    hold(trial, saved_optimizers.save_on_rank_0, *subjects)


@pytest.mark.api("optim_state_dict", "optim_state_dict_to_load")
@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        pytest.param(SGD, SHARDS, FLAT, marks=LOSSES),
        pytest.param(SGD, FLAT, KEPT, marks=LOSSES),
        pytest.param(SGD, KEPT, WHOLE, marks=LOSSES),
        pytest.param(SGD, WHOLE, WHOLE_FLAT, marks=LOSSES),
        pytest.param(SGD, WHOLE_FLAT, OTHER_UNITS, marks=LOSSES),
        pytest.param(SGD, OTHER_UNITS, HYBRID, marks=LOSSES),
        pytest.param(SGD, HYBRID, SHARDS, marks=LOSSES),
        pytest.param(ADAMW, FLAT, FLAT_HEAD, marks=STEPS),
        pytest.param(ADAMW, FLAT, WHOLE_FLAT, marks=STEPS),
        pytest.param(ADAMW, WHOLE, WHOLE_FLAT, marks=STEPS),
        pytest.param(ADAMW, WHOLE, OTHER_UNITS, marks=STEPS),
    ],
    ids=lambda value: value.name.lower() if isinstance(value, Kind) else str(value),
)
def test_resumes_in_another_wrapping(trial: Trial, kind: Kind, before: Wrapping, after: Wrapping) -> None:
    hold(trial, saved_optimizers.resume, RESUMED, arguments=(Route.FULL, kind, before, after))


@pytest.mark.api("optim_state_dict", "optim_state_dict_to_load")
@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("SavesTheLastMomentAsAll")
@pytest.mark.parametrize("after", [SHARDS, FLAT_HEAD], ids=str)
def test_resumes_two_moments_of_shards_by_name(trial: Trial, after: Wrapping) -> None:
    hold(trial, saved_optimizers.resume, RESUMED, arguments=(Route.FULL, ADAMW, SHARDS, after))


@pytest.mark.api("optim_state_dict", "optim_state_dict_to_load")
@pytest.mark.kills("SharesTheCountOfSteps")
@pytest.mark.parametrize("after", [SHARDS, KEPT], ids=str)
def test_resumes_by_name_the_steps_that_flat_parameters_shared(trial: Trial, after: Wrapping) -> None:
    hold(trial, saved_optimizers.resume, RESUMED, arguments=(Route.FULL, ADAMW, FLAT, after))


@pytest.mark.api("optim_state_dict", "optim_state_dict_to_load", "ShardedOptimStateDictConfig")
@pytest.mark.worlds(SEVERAL)
@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        pytest.param(SGD, SHARDS, FLAT_HEAD, marks=LOSSES),
        pytest.param(ADAMW, SHARDS, FLAT_HEAD, marks=STEPS),
        pytest.param(SGD, MESH, MESH_ROOT, marks=LOSSES),
        pytest.param(ADAMW, MESH, MESH_ROOT, marks=STEPS),
    ],
    ids=lambda value: value.name.lower() if isinstance(value, Kind) else str(value),
)
def test_resumes_from_shards(trial: Trial, kind: Kind, before: Wrapping, after: Wrapping) -> None:
    hold(trial, saved_optimizers.resume, RESUMED, arguments=(Route.SHARDED, kind, before, after))


@pytest.mark.api("optim_state_dict", "optim_state_dict_to_load", "FullOptimStateDictConfig")
@pytest.mark.parametrize(
    ("kind", "before"),
    [pytest.param(SGD, SHARDS, marks=LOSSES), pytest.param(ADAMW, FLAT, marks=STEPS)],
    ids=lambda value: value.name.lower() if isinstance(value, Kind) else str(value),
)
@pytest.mark.parametrize(
    "route", [Route.FULL_ON_RANK_0, Route.LOADED_DIRECTLY], ids=lambda route: route.name.lower()
)
def test_resumes_by_every_route(trial: Trial, route: Route, kind: Kind, before: Wrapping) -> None:
    hold(trial, saved_optimizers.resume, RESUMED, arguments=(route, kind, before, FLAT_HEAD))


@pytest.mark.api("optim_state_dict")
@pytest.mark.kills("IgnoresTheStateGiven")
@pytest.mark.parametrize(
    ("kind", "before"),
    [(SGD, SHARDS), (ADAMW, FLAT)],
    ids=lambda v: v.name.lower() if isinstance(v, Kind) else str(v),
)
def test_resumes_from_a_state_that_it_is_given(trial: Trial, kind: Kind, before: Wrapping) -> None:
    hold(trial, saved_optimizers.resume, RESUMED, arguments=(Route.GIVEN, kind, before, FLAT_HEAD))


@pytest.mark.api("optim_state_dict", "optim_state_dict_to_load")
@pytest.mark.kills("PermutesGroups")
def test_resumes_groups_that_take_turns(trial: Trial) -> None:
    subjects = ("the names of each group", "the options of each group", RESUMED)
    hold(trial, saved_optimizers.resume_groups, *subjects)
