"""A sharding engine gathers each group when it needs it and reduce-scatters each group once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardproof import FOUR_OR_MORE_EVEN, SEVERAL, AllWaited, Between, Bytes, Count, Exactly, Nothing
from shardproof import OnlyThese, Op, Problem, RanksAgree, Reshard, Select, Training, Trial
from shardproof.fixtures.problems import MLP_EVEN, MLP_UNEVEN, TRANSFORMER
from shardproof.suites.closed_forms import GRADIENT_BYTES, NUM_GROUPS, PADDED_BYTES
from shardproof.suites.params import parametrize
from shardproof.suites.training import train_sharded
from shardproof.suites.vocabulary import GATHERS_IN_BACKWARD, GATHERS_IN_FORWARD, REDUCE_SCATTERS

pytestmark = [pytest.mark.rows("C06"), pytest.mark.worlds(SEVERAL)]

PROBLEMS = [MLP_EVEN, MLP_UNEVEN, TRANSFORMER]
ONCE_PER_GROUP = Exactly(NUM_GROUPS)


def _training(problem: Problem, reshard: Reshard) -> Training:
    return train_sharded(problem, reshard=reshard)


@pytest.mark.kills("GathersOnceMoreInBackward", "TakesAllUnitsForOne")
@parametrize("problem", *PROBLEMS)
def test_gathers_each_group_twice_when_freed_after_forward(trial: Trial, problem: Problem) -> None:
    trial.holds(
        _training(problem, Reshard.AFTER_FORWARD),
        Count(select=GATHERS_IN_FORWARD, expected=ONCE_PER_GROUP),
        Count(select=GATHERS_IN_BACKWARD, expected=ONCE_PER_GROUP),
        Count(select=REDUCE_SCATTERS, expected=ONCE_PER_GROUP),
        OnlyThese(selects=(GATHERS_IN_FORWARD, GATHERS_IN_BACKWARD, REDUCE_SCATTERS)),
        RanksAgree(),
    )


@pytest.mark.kills("GathersOnceMoreInBackward", "FreesWhatItWasAskedToKeep")
@parametrize("problem", *PROBLEMS)
def test_gathers_each_group_once_when_kept(trial: Trial, problem: Problem) -> None:
    trial.holds(
        _training(problem, Reshard.KEEP),
        Count(select=GATHERS_IN_FORWARD, expected=ONCE_PER_GROUP),
        Nothing(select=GATHERS_IN_BACKWARD),
        Count(select=REDUCE_SCATTERS, expected=ONCE_PER_GROUP),
        OnlyThese(selects=(GATHERS_IN_FORWARD, REDUCE_SCATTERS)),
        RanksAgree(),
    )


@pytest.mark.kills("FreesWholeWhereAPartWasAsked")
@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
def test_gathers_each_group_from_its_pair_when_sharded_over_pairs(trial: Trial) -> None:
    from_pairs = replace(GATHERS_IN_BACKWARD, group_size=2)
    trial.holds(
        _training(MLP_UNEVEN, Reshard.TO_PAIRS),
        Count(select=replace(GATHERS_IN_FORWARD, group_size=trial.world_size), expected=ONCE_PER_GROUP),
        Count(select=from_pairs, expected=ONCE_PER_GROUP),
        Count(select=REDUCE_SCATTERS, expected=ONCE_PER_GROUP),
        OnlyThese(selects=(GATHERS_IN_FORWARD, from_pairs, REDUCE_SCATTERS)),
        RanksAgree(),
    )


@pytest.mark.kills("ReducesInBfloat16")
@parametrize("problem", *PROBLEMS)
def test_moves_no_more_than_the_padded_model(trial: Trial, problem: Problem) -> None:
    size = Between(GRADIENT_BYTES, PADDED_BYTES)
    trial.holds(
        _training(problem, Reshard.AFTER_FORWARD),
        Bytes(select=GATHERS_IN_FORWARD, expected=size, minimum=GRADIENT_BYTES),
        Bytes(select=REDUCE_SCATTERS, expected=size, minimum=GRADIENT_BYTES),
        AllWaited(select=Select(ops=(Op.ALL_GATHER, Op.REDUCE_SCATTER))),
    )
