"""Experts that ranks share out are reduced over the ranks that hold the same ones, beside weights of all ranks."""

from __future__ import annotations

import pytest

from shardproof import FOUR_OR_MORE_EVEN, Accumulation, AllWaited, Count, Exactly, Grouping, Layout
from shardproof import MatchesOracle, Microbatches, NamedOptimizer, Nothing, Op, Per, Phase, Plan, RanksAgree
from shardproof import Reshard, Schedule, Select, Training, Trial
from shardproof.fixtures.experts import MIXTURE
from shardproof.fixtures.optimizers import ADAMW, SGD

EXPERTS = tuple(f"{unit}.experts.{weight}" for unit in MIXTURE.units for weight in ("inward", "outward"))
OF_EXPERTS = Select(ops=(Op.REDUCE_SCATTER,), axis="data", phases=(Phase.BACKWARD,))
GATHERS_AGAIN = Select(ops=(Op.ALL_GATHER,), axis="data", phases=(Phase.BACKWARD,))
ONCE_PER_BLOCK = Exactly(len(MIXTURE.units))

pytestmark = [pytest.mark.rows("T33"), pytest.mark.worlds(FOUR_OR_MORE_EVEN)]


@pytest.mark.kills("ScalesExpertsByTheirRanks", "MixesExpertsUp")
@pytest.mark.parametrize(
    ("reshard", "optimizer"),
    [
        pytest.param(Reshard.AFTER_FORWARD, SGD, id="freed-sgd"),
        pytest.param(Reshard.KEEP, ADAMW, id="kept-adamw"),
    ],
)
def test_experts_train_beside_weights_of_all_ranks(
    trial: Trial, reshard: Reshard, optimizer: NamedOptimizer
) -> None:
    gathers = Count(select=GATHERS_AGAIN, expected=ONCE_PER_BLOCK)
    trial.holds(
        Training(problem=MIXTURE, optimizer=optimizer, plan=_plan(reshard)),
        MatchesOracle(),
        Nothing(select=GATHERS_AGAIN) if reshard is Reshard.KEEP else gathers,
        Count(select=OF_EXPERTS, expected=ONCE_PER_BLOCK),
        AllWaited(select=OF_EXPERTS),
        RanksAgree(),
    )


@pytest.mark.kills("ScalesExpertsByTheirRanks", "MixesExpertsUp")
def test_experts_accumulate_until_the_last_microbatch(trial: Trial) -> None:
    before = Select(ops=OF_EXPERTS.ops, axis="data", microbatches=Microbatches.ALL_BUT_LAST)
    plan = _plan(Reshard.AFTER_FORWARD, Accumulation.LAST_MICROBATCH)
    trial.holds(
        Training(problem=MIXTURE, optimizer=SGD, plan=plan, schedule=Schedule(microbatches=3)),
        MatchesOracle(),
        Count(select=OF_EXPERTS, expected=ONCE_PER_BLOCK, per=Per.STEP),
        Nothing(select=before),
        RanksAgree(),
    )


def _plan(reshard: Reshard, accumulation: Accumulation = Accumulation.EVERY_MICROBATCH) -> Plan:
    return Plan(
        layout=Layout.SHARD,
        expert_parallel=2,
        experts=EXPERTS,
        units=MIXTURE.units,
        grouping=Grouping.REQUIRED,
        reshard=reshard,
        accumulation=accumulation,
    )
