"""use_orig_params, sharding_strategy, process_group, device_mesh, ignored parameters, cpu_offload."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp import ShardingStrategy

from shardproof import FOUR_OR_MORE_EVEN, SEVERAL, MatchesOracle, Notes, Trial
from suites.wrapper.exercises.parameters import (
    IGNORED,
    NAMES,
    SUMS,
    ignores,
    keeps_on_the_host,
    shards_over_a_group,
    shows_flat,
    shows_pieces,
    shows_states,
    trains_in_replicas,
)
from suites.wrapper.exercises.wrapped import GRADIENTS
from suites.wrapper.exercising import exercise

TRUE = "True"
FULL, ZERO2, NO = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
HYBRID, HYBRID_ZERO2 = ShardingStrategy.HYBRID_SHARD, ShardingStrategy["_HYBRID_SHARD_ZERO2"]
ALL_BUT_HEAD = ["", *(f"blocks.{i}.{layer}" for i in range(2) for layer in ("first", "second")), "stem"]

KEEPS, FREES = pytest.mark.kills("KeepsWhatTheStrategyFrees"), pytest.mark.kills("FreesWhatTheStrategyKeeps")
SHARDS = pytest.mark.kills("ShardsWhatTheStrategyReplicates")


@pytest.mark.kills("AlwaysShowsFlatParameters")
@pytest.mark.api("use_orig_params")
@pytest.mark.worlds(SEVERAL)  # for a lone rank the pieces are the parameters
def test_shows_pieces_under_the_old_names(trial: Trial) -> None:
    trial.holds(
        exercise(shows_pieces),
        Notes(subject=NAMES, value=TRUE),
        Notes(subject="dims of pieces", value="[1]"),
        Notes(subject=SUMS, value=TRUE),
        MatchesOracle(),
    )


@pytest.mark.kills("AlwaysShowsNames")
@pytest.mark.api("use_orig_params", "FlatParameter")
@pytest.mark.worlds(SEVERAL)  # for a lone rank the pieces are the parameters
def test_shows_one_flat_parameter_for_each_unit(trial: Trial) -> None:
    trial.holds(
        exercise(shows_flat),
        Notes(subject="number of flat parameters", value="3"),
        Notes(subject="all parameters are flat", value=TRUE),
        Notes(subject=SUMS, value=TRUE),
        MatchesOracle(),
    )


@pytest.mark.worlds(SEVERAL)
@pytest.mark.api("sharding_strategy")
@pytest.mark.parametrize(
    ("strategy", "between", "outside"),
    [
        pytest.param(None, "sharded", "sharded", id="default", marks=KEEPS),
        pytest.param(
            FULL, "sharded", "sharded", marks=[KEEPS, pytest.mark.api("ShardingStrategy.FULL_SHARD")]
        ),
        pytest.param(
            ZERO2, "whole", "sharded", marks=[FREES, pytest.mark.api("ShardingStrategy.SHARD_GRAD_OP")]
        ),
        pytest.param(NO, "whole", "whole", marks=[SHARDS, pytest.mark.api("ShardingStrategy.NO_SHARD")]),
        pytest.param(
            HYBRID,
            "sharded",
            "sharded",
            marks=[
                KEEPS,
                pytest.mark.worlds(FOUR_OR_MORE_EVEN),
                pytest.mark.api("ShardingStrategy.HYBRID_SHARD"),
            ],
        ),
        pytest.param(
            HYBRID_ZERO2,
            "whole",
            "sharded",
            marks=[
                FREES,
                pytest.mark.worlds(FOUR_OR_MORE_EVEN),
                pytest.mark.api("ShardingStrategy._HYBRID_SHARD_ZERO2"),
            ],
        ),
    ],
    ids=lambda x: x.name.strip("_").lower() if isinstance(x, ShardingStrategy) else "",
)
def test_shards_and_frees_as_the_strategy_says(
    trial: Trial, strategy: ShardingStrategy | None, between: str, outside: str
) -> None:
    trial.holds(
        exercise(shows_states, strategy),
        Notes(subject="before forward", value=outside),
        Notes(subject="after forward", value=between),
        Notes(subject="after backward", value=outside),
        MatchesOracle(),
    )


@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            "group", marks=[pytest.mark.kills("IgnoresTheGroupGiven"), pytest.mark.api("process_group")]
        ),
        pytest.param(
            "mesh", marks=[pytest.mark.kills("IgnoresTheMeshGiven"), pytest.mark.api("device_mesh")]
        ),
    ],
)
def test_shards_over_the_ranks_given(trial: Trial, kind: str) -> None:
    trial.holds(exercise(shards_over_a_group, kind), Notes(subject=GRADIENTS, value=TRUE), MatchesOracle())


@pytest.mark.kills("NeverMeetsReplicas")
@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        pytest.param("groups", HYBRID, id="groups-freed", marks=pytest.mark.api("process_group")),
        pytest.param("mesh", HYBRID, id="mesh-freed", marks=pytest.mark.api("device_mesh")),
        pytest.param("groups", HYBRID_ZERO2, id="groups-kept", marks=pytest.mark.api("process_group")),
        pytest.param("mesh", HYBRID_ZERO2, id="mesh-kept", marks=pytest.mark.api("device_mesh")),
    ],
)
def test_trains_one_model_in_two_replicas(trial: Trial, kind: str, strategy: ShardingStrategy) -> None:
    trial.holds(
        exercise(trains_in_replicas, kind, strategy),
        Notes(subject=GRADIENTS, value=TRUE),
        Notes(subject="each replica holds the model once", value=TRUE),
        MatchesOracle(),
    )


@pytest.mark.kills("ForgetsWhatToIgnore")
@pytest.mark.worlds(SEVERAL)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("ignored_modules", id="modules", marks=pytest.mark.api("ignored_modules")),
        pytest.param("ignored_states of modules", id="states", marks=pytest.mark.api("ignored_states")),
    ],
)
def test_leaves_ignored_modules_alone(trial: Trial, kind: str) -> None:
    trial.holds(
        exercise(ignores, kind),
        Notes(subject="units", value=str(ALL_BUT_HEAD)),
        Notes(subject=IGNORED, value=TRUE),
        Notes(subject="gradients of ignored parameters are the rank's own", value=TRUE),
        MatchesOracle(),
    )


@pytest.mark.kills("ForgetsWhatToIgnore")
@pytest.mark.api("ignored_states")
@pytest.mark.worlds(SEVERAL)
def test_leaves_ignored_parameters_alone(trial: Trial) -> None:
    trial.holds(
        exercise(ignores, "ignored_states of parameters"),
        Notes(subject=IGNORED, value=TRUE),
        Notes(subject="gradients of ignored parameters are the rank's own", value=TRUE),
        MatchesOracle(),
    )


@pytest.mark.kills("ReadsOffloadedGradientsTooEarly")
@pytest.mark.api("cpu_offload", "CPUOffload")
def test_keeps_what_is_offloaded_on_the_host(trial: Trial) -> None:
    trial.holds(
        exercise(keeps_on_the_host),
        Notes(subject=GRADIENTS, value=TRUE),
        Notes(subject="devices between steps", value="['cpu']"),
        MatchesOracle(),
    )
