"""StateDictType and the config classes: kept as set, refused where they belong to another type, and followed."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp import StateDictType

from shardproof import APART, SEVERAL, MatchesOracle, Notes, Trial
from suites.wrapper.exercises.settings import (
    forms_of_optimizer_state,
    forms_of_parameters,
    keeps_settings,
    refuses_others,
    rekeys,
)
from suites.wrapper.exercising import exercise

TRUE = "True"
FULL = pytest.mark.api("FullStateDictConfig", "FullOptimStateDictConfig")
LOCAL = pytest.mark.api("LocalStateDictConfig", "LocalOptimStateDictConfig")
SHARDED = pytest.mark.api("ShardedStateDictConfig", "ShardedOptimStateDictConfig")
WHOLE = pytest.mark.kills("GivesShardsForWholes")
every_type = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(StateDictType.FULL_STATE_DICT, id="full", marks=FULL),
        pytest.param(StateDictType.LOCAL_STATE_DICT, id="local", marks=LOCAL),
        pytest.param(StateDictType.SHARDED_STATE_DICT, id="sharded", marks=SHARDED),
    ],
)
FORMS = [
    pytest.param("full", id="full", marks=WHOLE),
    pytest.param("full on rank 0", id="rank0", marks=pytest.mark.kills("IgnoresStateConfigs")),
    pytest.param("sharded", id="sharded", marks=pytest.mark.kills("GivesWholesForShards")),
]
ON_THE_HOST = pytest.param("full on the host", id="host", marks=[WHOLE, pytest.mark.api("StateDictConfig")])


@pytest.mark.kills("IgnoresStateConfigs")
@pytest.mark.api("StateDictType", "StateDictSettings", "StateDictConfig", "OptimStateDictConfig")
@every_type
def test_keeps_the_settings(trial: Trial, kind: StateDictType) -> None:
    offloads = kind is not StateDictType.LOCAL_STATE_DICT
    trial.holds(
        exercise(keeps_settings, kind),
        Notes(subject="before", value=TRUE),
        Notes(subject="by default", value=TRUE),
        Notes(subject="offloaded by default", value=str((False, offloads))),
        Notes(subject="returned", value=TRUE),
        Notes(subject="as chosen", value=TRUE),
        MatchesOracle(),
    )


@pytest.mark.kills("IgnoresStateConfigs")
@pytest.mark.api("StateDictType")
@every_type
def test_refuses_configs_of_another_type(trial: Trial, kind: StateDictType) -> None:
    trial.holds(
        exercise(refuses_others, kind),
        Notes(subject="config of another type", value="RuntimeError"),
        Notes(subject="optimizer's config of another type", value="RuntimeError"),
        MatchesOracle(),
    )


@pytest.mark.api("StateDictType", "FullStateDictConfig", "ShardedStateDictConfig")
@pytest.mark.worlds(SEVERAL)
@pytest.mark.parametrize("kind", [*FORMS, ON_THE_HOST])
def test_parameters_come_in_the_form_set(trial: Trial, kind: str) -> None:
    trial.holds(exercise(forms_of_parameters, kind), Notes(subject="form", value="as asked"), MatchesOracle())


# Torch counts in one place for the whole process what it measures while it gathers optimizer state.
@pytest.mark.api("StateDictType", "FullOptimStateDictConfig", "ShardedOptimStateDictConfig")
@pytest.mark.worlds(APART)
@pytest.mark.parametrize("kind", FORMS)
def test_optimizer_state_comes_in_the_form_set(trial: Trial, kind: str) -> None:
    trial.holds(
        exercise(forms_of_optimizer_state, kind), Notes(subject="form", value="as asked"), MatchesOracle()
    )


@pytest.mark.kills("NumbersStateByName")
@pytest.mark.api("OptimStateKeyType")
@pytest.mark.worlds(APART)  # as above
def test_optimizer_state_goes_by_name_or_id(trial: Trial) -> None:
    trial.holds(
        exercise(rekeys),
        Notes(subject="keys", value=TRUE),
        Notes(subject="ids", value=TRUE),
        Notes(subject="values by name and id", value="the same"),
        MatchesOracle(),
    )
