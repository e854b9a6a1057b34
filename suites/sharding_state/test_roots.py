"""Several roots beside each other train one model, each freed as planned, with their collectives in one order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardproof import AFTER_BACKWARD, AFTER_FORWARD, BEFORE_FORWARD, SEVERAL, Accumulation, Count, Exactly
from shardproof import Layout, LookAround, Microbatches, Nothing, Op, Phase, Reshard, Roots, Select
from shardproof import ShowsTheModel, Trial, UnitsAre
from shardproof.fixtures.problems import MLP_UNEVEN
from shardproof.suites.params import param, parametrize
from shardproof.suites.sharding_state.states import states
from shardproof.suites.training import train_sharded
from shardproof.suites.vocabulary import PARITY

ROOTS = MLP_UNEVEN.units
REDUCTIONS = Select(ops=(Op.REDUCE_SCATTER, Op.ALL_REDUCE), phases=(Phase.BACKWARD,), dtypes=("float32",))
MOMENTS = (BEFORE_FORWARD, AFTER_FORWARD, AFTER_BACKWARD)


@pytest.mark.rows("T37")
@pytest.mark.worlds(SEVERAL)
@parametrize(
    "layout, reshard",
    param(Layout.SHARD, Reshard.AFTER_FORWARD, kills="KeepsRootsWhateverAsked"),
    param(Layout.SHARD, Reshard.NATIVE, kills="FreesTheRootByDefault"),
    param(Layout.REPLICATE, Reshard.NATIVE, id="replicate"),
)
@pytest.mark.kills("HoldsBackTheFirstRootAlone")
def test_trains_roots_beside_each_other(trial: Trial, layout: Layout, reshard: Reshard) -> None:
    is_freed = reshard is Reshard.AFTER_FORWARD
    training = train_sharded(
        MLP_UNEVEN,
        layout=layout,
        roots=Roots.EACH_UNIT,
        reshard=reshard,
        accumulation=Accumulation.LAST_MICROBATCH,
        microbatches=2,
        script=LookAround(),
    )
    trial.holds(
        training,
        UnitsAre(
            states=(
                *states(BEFORE_FORWARD, sharded=ROOTS),
                *states(AFTER_FORWARD, **{"sharded" if is_freed else "unsharded": ROOTS}),
                *states(AFTER_BACKWARD, sharded=ROOTS),
            )
        ),
        ShowsTheModel(moments=MOMENTS),
        Nothing(select=replace(REDUCTIONS, microbatches=Microbatches.ALL_BUT_LAST)),
        Count(select=replace(REDUCTIONS, microbatches=Microbatches.LAST), expected=Exactly(len(ROOTS))),
        *PARITY,
    )
