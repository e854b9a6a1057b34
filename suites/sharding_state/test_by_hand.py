"""Units that the caller gathers by call have whole parameters, and are not gathered again."""

from __future__ import annotations

import pytest

from shardproof import AFTER_BACKWARD, BEFORE_BACKWARD, BEFORE_FORWARD, FOUR_OR_MORE_EVEN, SEVERAL, AllWaited
from shardproof import Count, Exactly, Gather, Layout, OnlyThese, Op, Per, Phase, Problem, Reshard, Select
from shardproof import ShowsTheModel, Training, Trial, UnitsAre, UnshardByHand, Window
from shardproof.fixtures.heads import TALKATIVE
from shardproof.fixtures.thin import ODD_SHAPES
from shardproof.fixtures.problems import MLP_UNEVEN
from shardproof.suites.params import param, parametrize
from shardproof.suites.sharding_state.states import states
from shardproof.suites.training import train_sharded
from shardproof.suites.vocabulary import PARITY

pytestmark = pytest.mark.worlds(SEVERAL)

GATHERS = Select(ops=(Op.ALL_GATHER,), window=Window.TRAINING)
BY_HAND = Select(ops=(Op.ALL_GATHER,), phases=(Phase.BETWEEN,), window=Window.TRAINING)
INNER = ("layers.0", "layers.1")  # the root owns the other two layers
EVERY_LAYER = MLP_UNEVEN.units  # the root owns nothing


def _training(
    problem: Problem, layout: Layout, reshard: Reshard, units: tuple[str, ...], gather: Gather
) -> Training:
    script = UnshardByHand(units=(*units, ""), gather=gather)
    return train_sharded(problem, layout=layout, units=units, reshard=reshard, script=script)


def _gathers_by_hand(number: int) -> tuple[Count, OnlyThese, AllWaited]:
    return (
        Count(select=BY_HAND, expected=Exactly(number), per=Per.STEP),
        OnlyThese(selects=(BY_HAND,), among=GATHERS),
        AllWaited(select=GATHERS),
    )


@pytest.mark.rows("C01", "C22")
@parametrize(
    "gather, reshard",
    param(Gather.BLOCKING, Reshard.AFTER_FORWARD, kills=("ShowsPaddedRows", "GathersInForwardAlone")),
    param(Gather.AWAITED, Reshard.AFTER_FORWARD, kills=("ShowsPaddedRows", "LeavesOthersRowsStale")),
    param(
        Gather.BLOCKING,
        Reshard.TO_PAIRS,
        kills=("ShowsPaddedRows", "GathersInForwardAlone"),
        worlds=FOUR_OR_MORE_EVEN,
    ),
)
def test_shows_odd_shapes_whole(trial: Trial, gather: Gather, reshard: Reshard) -> None:
    trial.holds(
        _training(ODD_SHAPES, Layout.SHARD, reshard, (), gather),
        UnitsAre(
            states=(
                *states(BEFORE_FORWARD, unsharded=("",)),
                *states(BEFORE_BACKWARD, unsharded=("",)),
                *states(AFTER_BACKWARD, sharded=("",)),
            )
        ),
        ShowsTheModel(moments=(BEFORE_FORWARD, BEFORE_BACKWARD, AFTER_BACKWARD)),
        *_gathers_by_hand(2),
        *PARITY,
    )


@pytest.mark.rows("C20", "C22")
@pytest.mark.kills("GathersInForwardAlone", "GathersWhenWaitedFor")
@parametrize(
    "reshard, times", param(Reshard.KEEP, 1, id="keep"), param(Reshard.AFTER_FORWARD, 2, id="after_forward")
)
def test_gathers_ahead_between_other_collectives(trial: Trial, reshard: Reshard, times: int) -> None:
    trial.holds(
        _training(TALKATIVE, Layout.SHARD, reshard, TALKATIVE.units, Gather.UNAWAITED),
        *_gathers_by_hand(times * len(TALKATIVE.units)),
        *PARITY,
    )


@pytest.mark.rows("C21", "C22")
@pytest.mark.kills("WaitsForNoGather")
def test_gathers_a_root_that_owns_nothing(trial: Trial) -> None:
    trial.holds(
        _training(MLP_UNEVEN, Layout.SHARD, Reshard.KEEP, EVERY_LAYER, Gather.AWAITED),
        UnitsAre(
            states=(
                *states(BEFORE_FORWARD, unsharded=EVERY_LAYER),
                *states(AFTER_BACKWARD, sharded=EVERY_LAYER),
            )
        ),
        ShowsTheModel(moments=(BEFORE_FORWARD, AFTER_BACKWARD)),
        *_gathers_by_hand(len(EVERY_LAYER)),
        *PARITY,
    )


@pytest.mark.rows("C22", "R02")
@pytest.mark.kills("GathersInForwardAlone")
def test_shows_replicas_whole(trial: Trial) -> None:
    groups = (*INNER, "")
    trial.holds(
        _training(MLP_UNEVEN, Layout.REPLICATE, Reshard.NATIVE, INNER, Gather.AWAITED),
        UnitsAre(states=(*states(BEFORE_FORWARD, unsharded=groups), *states(AFTER_BACKWARD, sharded=groups))),
        ShowsTheModel(moments=(BEFORE_FORWARD, BEFORE_BACKWARD, AFTER_BACKWARD)),
        *PARITY,
    )
