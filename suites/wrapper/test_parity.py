"""With every strategy, form of parameters, number of ranks and of microbatches, the same model is trained.

Each value of each option meets each value of every other, but not all combinations occur.
"""

from __future__ import annotations

from typing import Any

import pytest

from shardproof import FOUR_OR_MORE_EVEN, SEVERAL, Layout
from shardproof import Plan, Reshard, Schedule, Training, Trial, Wrapper
from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.problems import MLP_UNEVEN
from shardproof.suites.params import param, parametrize
from shardproof.suites.vocabulary import PARITY

SHARD, HYBRID, REPLICATE = Layout.SHARD, Layout.HYBRID, Layout.REPLICATE
FREED, KEPT, NATIVE = Reshard.AFTER_FORWARD, Reshard.KEEP, Reshard.NATIVE
FULL, ZERO2 = "ShardingStrategy.FULL_SHARD", "ShardingStrategy.SHARD_GRAD_OP"
HYBRID_FULL, HYBRID_ZERO2 = "ShardingStrategy.HYBRID_SHARD", "ShardingStrategy._HYBRID_SHARD_ZERO2"
in_replicas = pytest.mark.worlds(FOUR_OR_MORE_EVEN)


# Any: pytest has no public name for pytest.param's result.
def _case(strategy: str, layout: Layout, reshard: Reshard, wrapper: Wrapper) -> Any:
    marks = [pytest.mark.api(strategy), *([in_replicas] if layout is HYBRID else [])]
    form = "names" if wrapper.use_orig_params else "flat"
    ranks = "groups" if wrapper.by_groups else "mesh"
    name = strategy.partition(".")[2].strip("_").lower()
    return param(layout, reshard, wrapper, id=f"{name}-{form}-{ranks}", marks=marks)


NAMES, FLAT = Wrapper(use_orig_params=True), Wrapper(use_orig_params=False)
NAMES_IN_GROUPS = Wrapper(use_orig_params=True, by_groups=True)
FLAT_IN_GROUPS = Wrapper(use_orig_params=False, by_groups=True)
every_strategy = parametrize(
    "layout, reshard, wrapper",
    _case(FULL, SHARD, FREED, NAMES),
    _case(FULL, SHARD, FREED, FLAT_IN_GROUPS),
    _case(ZERO2, SHARD, KEPT, NAMES_IN_GROUPS),
    _case(ZERO2, SHARD, KEPT, FLAT),
    _case("ShardingStrategy.NO_SHARD", REPLICATE, NATIVE, NAMES_IN_GROUPS),
    _case("ShardingStrategy.NO_SHARD", REPLICATE, NATIVE, FLAT),
    _case(HYBRID_FULL, HYBRID, FREED, NAMES),
    _case(HYBRID_FULL, HYBRID, FREED, FLAT_IN_GROUPS),
    _case(HYBRID_ZERO2, HYBRID, KEPT, NAMES_IN_GROUPS),
    _case(HYBRID_ZERO2, HYBRID, KEPT, FLAT),
)
pytestmark = [
    pytest.mark.worlds(SEVERAL),
    pytest.mark.api("sharding_strategy", "use_orig_params", "process_group", "device_mesh"),
]


@pytest.mark.kills("DividesWrappedGradientsTwice")
@parametrize("microbatches", 1, 3, ids="m{}".format)
@every_strategy
def test_trains_the_same_model(
    trial: Trial, layout: Layout, reshard: Reshard, wrapper: Wrapper, microbatches: int
) -> None:
    plan = Plan(layout=layout, reshard=reshard, units=MLP_UNEVEN.units, wrapper=wrapper)
    trial.holds(_training(plan, microbatches), *PARITY)


def _training(plan: Plan, microbatches: int) -> Training:
    schedule = Schedule(microbatches=microbatches)
    return Training(problem=MLP_UNEVEN, optimizer=SGD, plan=plan, schedule=schedule)
