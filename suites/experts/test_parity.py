"""Sharded experts are reduced over the ranks that hold the same ones, beside weights of all ranks."""

from __future__ import annotations

from typing import Any

import pytest

from shardproof import FOUR_OR_MORE_EVEN, Accumulation, AllWaited, Clip, Count, Exactly, MatchesOracle
from shardproof import Microbatches, NamedOptimizer, Nothing, Op, Per, Phase, RanksAgree, Reshard, Select
from shardproof import Training, Trial
from shardproof.fixtures.experts import MIXTURE
from shardproof.fixtures.optimizers import ADAMW, SGD
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train_sharded

EXPERTS = tuple(f"{unit}.experts.{weight}" for unit in MIXTURE.units for weight in ("inward", "outward"))
OF_EXPERTS = Select(ops=(Op.REDUCE_SCATTER,), axis="data", phases=(Phase.BACKWARD,))
GATHERS_AGAIN = Select(ops=(Op.ALL_GATHER,), axis="data", phases=(Phase.BACKWARD,))
ONCE_PER_BLOCK = Exactly(len(MIXTURE.units))

pytestmark = [pytest.mark.rows("T33"), pytest.mark.worlds(FOUR_OR_MORE_EVEN)]


@pytest.mark.kills("ScalesExpertsByTheirRanks", "MixesExpertsUp")
@parametrize(
    "reshard, optimizer",
    param(Reshard.AFTER_FORWARD, SGD, id="freed-sgd"),
    param(Reshard.KEEP, ADAMW, id="kept-adamw"),
)
def test_experts_train_beside_weights_of_all_ranks(
    trial: Trial, reshard: Reshard, optimizer: NamedOptimizer
) -> None:
    gathers = Count(select=GATHERS_AGAIN, expected=ONCE_PER_BLOCK)
    trial.holds(
        _training(optimizer, reshard=reshard),
        MatchesOracle(),
        Nothing(select=GATHERS_AGAIN) if reshard is Reshard.KEEP else gathers,
        Count(select=OF_EXPERTS, expected=ONCE_PER_BLOCK),
        AllWaited(select=OF_EXPERTS),
        RanksAgree(),
    )


@pytest.mark.kills("ScalesExpertsByTheirRanks", "MixesExpertsUp")
def test_experts_accumulate_until_the_last_microbatch(trial: Trial) -> None:
    before = Select(ops=OF_EXPERTS.ops, axis="data", microbatches=Microbatches.ALL_BUT_LAST)
    late = Accumulation.LAST_MICROBATCH
    trial.holds(
        _training(reshard=Reshard.AFTER_FORWARD, accumulation=late, microbatches=3),
        MatchesOracle(),
        Count(select=OF_EXPERTS, expected=ONCE_PER_BLOCK, per=Per.STEP),
        Nothing(select=before),
        RanksAgree(),
    )


@pytest.mark.kills("AveragesTheNormsOfExperts")
def test_experts_count_once_in_the_norm(trial: Trial) -> None:
    training = _training(clip=Clip(max_norm=0.5))
    trial.holds(training, MatchesOracle(), RanksAgree())


# Any: as for `train`.
def _training(*optimizer: NamedOptimizer, **asked: Any) -> Training:
    return train_sharded(MIXTURE, *optimizer, expert_parallel=2, experts=EXPERTS, **asked)
