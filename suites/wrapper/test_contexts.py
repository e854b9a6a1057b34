"""State dict types: set, told, scoped by a context that gives back what was before, and refused."""

from __future__ import annotations

import pytest

from shardproof import Trial
from suites.wrapper import settings
from suites.wrapper.exercised import hold

CONFIGS = (
    "StateDictSettings",
    "StateDictConfig",
    "FullStateDictConfig",
    "ShardedStateDictConfig",
    "LocalStateDictConfig",
    "OptimStateDictConfig",
    "FullOptimStateDictConfig",
    "ShardedOptimStateDictConfig",
    "LocalOptimStateDictConfig",
)


@pytest.mark.api("set_state_dict_type", "get_state_dict_type", *CONFIGS)
@pytest.mark.kills("ForgetsConfigs", "TellsTheNewTypeAsTheOld")
def test_sets_the_type_and_tells_what_was_before(trial: Trial) -> None:
    subjects = (
        "the type at first",
        "what was before",
        "what is told",
        "configs of one's own",
        "what a unit tells",
    )
    hold(trial, settings.set_types, *subjects)


@pytest.mark.api("set_state_dict_type", "get_state_dict_type")
@pytest.mark.kills("SetsTheTypeOfTheFirstRootAlone")
def test_sets_the_type_of_all_wrapped_modules_below(trial: Trial) -> None:
    hold(trial, settings.set_types_of_others, "what each tells")


@pytest.mark.api("state_dict_type")
@pytest.mark.kills("ScopesNothing", "LeavesFullStateDicts")
def test_gives_the_type_back_at_the_end_of_a_context(trial: Trial) -> None:
    hold(trial, settings.scope_types, "inside", "inside both", "inside again", "afterwards")


@pytest.mark.api("state_dict_type")
@pytest.mark.kills("LeavesTheTypeAfterAnException")
def test_gives_the_type_back_after_an_exception(trial: Trial) -> None:
    hold(trial, settings.leave_by_an_exception, "the exception", "the type afterwards")


@pytest.mark.api("set_state_dict_type", *CONFIGS)
@pytest.mark.kills("TakesConfigsOfOtherTypes")
def test_refuses_configs_of_another_type(trial: Trial) -> None:
    hold(trial, settings.refuse_configs, "configs of another type", "what is told afterwards")


@pytest.mark.api("get_state_dict_type", "set_state_dict_type")
@pytest.mark.kills("TellsTheTypeOfSomeUnit")
def test_refuses_units_of_several_types(trial: Trial) -> None:
    subjects = (
        "asking units that differ",
        "setting units that differ",
        "asking units of other configs",
    )
    hold(trial, settings.refuse_mixtures, *subjects)
