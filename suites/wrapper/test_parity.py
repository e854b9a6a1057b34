"""Whatever the strategy, the form of parameters, the ranks and the microbatches, the same model is trained.

Each value of each option meets each value of every other, and all of them do not meet all.
"""

from __future__ import annotations

import pytest

from engine.contract import Accumulation, Layout, Plan, Reshard, Wrapper
from fixtures.optimizers import ADAMW, SGD
from fixtures.problems import MLP_UNEVEN
from harness.case import Schedule, Training
from harness.ledger.agreement import RanksAgree
from harness.ledger.entry import Op, Phase
from harness.ledger.laws import Nothing
from harness.ledger.selection import Microbatches, Select
from harness.parity import MatchesOracle
from harness.pytest_plugin import Trial
from harness.worlds.sizes import FOUR_OR_MORE_EVEN, SEVERAL

REDUCING = (Op.ALL_REDUCE, Op.REDUCE_SCATTER)
EARLY = Select(ops=REDUCING, phases=(Phase.BACKWARD,), microbatches=Microbatches.ALL_BUT_LAST)
SHARD, HYBRID, REPLICATE = Layout.SHARD, Layout.HYBRID, Layout.REPLICATE
FREED, KEPT, NATIVE = Reshard.AFTER_FORWARD, Reshard.KEEP, Reshard.NATIVE
EVERY, LAST = Accumulation.EVERY_MICROBATCH, Accumulation.LAST_MICROBATCH
replicas = [pytest.mark.worlds(FOUR_OR_MORE_EVEN), pytest.mark.api("ShardingStrategy.HYBRID_SHARD")]
zero2_replicas = [
    pytest.mark.worlds(FOUR_OR_MORE_EVEN),
    pytest.mark.api("ShardingStrategy._HYBRID_SHARD_ZERO2"),
]
full = pytest.mark.api("ShardingStrategy.FULL_SHARD")
zero2 = pytest.mark.api("ShardingStrategy.SHARD_GRAD_OP")
no = pytest.mark.api("ShardingStrategy.NO_SHARD")


@pytest.mark.worlds(SEVERAL)
@pytest.mark.api("sharding_strategy", "use_orig_params", "process_group", "device_mesh")
@pytest.mark.parametrize(
    ("layout", "reshard", "names", "groups", "accumulation"),
    [
        pytest.param(SHARD, FREED, True, False, EVERY, id="full-names-mesh-every", marks=full),
        pytest.param(SHARD, FREED, False, True, LAST, id="full-flat-groups-last", marks=full),
        pytest.param(SHARD, KEPT, True, True, LAST, id="zero2-names-groups-last", marks=zero2),
        pytest.param(SHARD, KEPT, False, False, EVERY, id="zero2-flat-mesh-every", marks=zero2),
        pytest.param(REPLICATE, NATIVE, True, True, EVERY, id="no-names-groups-every", marks=no),
        pytest.param(REPLICATE, NATIVE, False, False, LAST, id="no-flat-mesh-last", marks=no),
        pytest.param(HYBRID, FREED, True, False, LAST, id="hybrid-names-mesh-last", marks=replicas),
        pytest.param(HYBRID, FREED, False, True, EVERY, id="hybrid-flat-groups-every", marks=replicas),
        pytest.param(HYBRID, KEPT, True, True, EVERY, id="hybrid2-names-groups-every", marks=zero2_replicas),
        pytest.param(HYBRID, KEPT, False, False, LAST, id="hybrid2-flat-mesh-last", marks=zero2_replicas),
    ],
)
@pytest.mark.parametrize("microbatches", [1, 3], ids="m{}".format)
def test_trains_the_same_model(
    trial: Trial,
    layout: Layout,
    reshard: Reshard,
    names: bool,
    groups: bool,
    accumulation: Accumulation,
    microbatches: int,
) -> None:
    plan = Plan(
        layout=layout,
        reshard=reshard,
        units=MLP_UNEVEN.units,
        accumulation=accumulation,
        wrapper=Wrapper(use_orig_params=names, by_groups=groups),
    )
    training = Training(
        problem=MLP_UNEVEN,
        optimizer=SGD if microbatches == 1 else ADAMW,
        plan=plan,
        schedule=Schedule(microbatches=microbatches),
    )
    silence = [Nothing(select=EARLY)] if accumulation is LAST and microbatches > 1 else []
    trial.holds(training, MatchesOracle(), RanksAgree(), *silence)
