"""param_init_fn, device_id and sync_module_states: where parameters begin."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp import ShardingStrategy

from shardproof import EVEN, SEVERAL, MatchesOracle, Notes, Trial
from suites.wrapper.exercises.initial import DIFFERS, TIMES, VALUES, initialises, moves, resets, synchronises
from suites.wrapper.exercising import exercise


@pytest.mark.kills("NeverResets")
@pytest.mark.api("param_init_fn", "device_id")
def test_modules_without_memory_reset_themselves(trial: Trial) -> None:
    trial.holds(
        exercise(resets),
        Notes(subject=VALUES, value="reset"),
        Notes(subject="buffers", value="[4.0, 5.0]"),
        MatchesOracle(),
    )


@pytest.mark.kills("IgnoresTheInitialiser")
@pytest.mark.api("param_init_fn")
def test_a_function_initialises_each_module_once(trial: Trial) -> None:
    trial.holds(
        exercise(initialises),
        Notes(subject=VALUES, value="[[4.0], [-4.0], [5.0], [-5.0]]"),
        Notes(subject=TIMES, value="[1, 1]"),
        MatchesOracle(),
    )


@pytest.mark.kills("LeavesBuffersWithoutMemory")
@pytest.mark.api("device_id")
def test_initialises_and_runs_on_the_device(trial: Trial) -> None:
    trial.holds(
        exercise(moves),
        Notes(subject="tensors are on the device", value="True"),
        Notes(subject="the output is on the device", value="True"),
        MatchesOracle(),
    )


@pytest.mark.kills("StartsEachRankOnItsOwn")
@pytest.mark.api("sync_module_states")
@pytest.mark.worlds(SEVERAL)  # a lone rank is rank 0
def test_no_rank_starts_with_values_of_its_own(trial: Trial) -> None:
    shards = exercise(synchronises, ShardingStrategy.FULL_SHARD)
    trial.holds(shards, Notes(subject=DIFFERS, value="False"), MatchesOracle())


@pytest.mark.kills("StartsEachReplicaOnItsOwn")
@pytest.mark.api("sync_module_states", "ShardingStrategy.HYBRID_SHARD")
@pytest.mark.worlds(EVEN)
def test_no_replica_starts_with_values_of_its_own(trial: Trial) -> None:
    replicas = exercise(synchronises, ShardingStrategy.HYBRID_SHARD)
    trial.holds(replicas, Notes(subject=DIFFERS, value="False"), MatchesOracle())
