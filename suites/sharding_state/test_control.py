"""Policies that the caller later sets on single units affect only those units."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from shardproof import AFTER_BACKWARD, AFTER_FORWARD_FREED, AFTER_FORWARD_KEPT, NUM_CHUNKS, SEVERAL, Count
from shardproof import Exactly, HoldHeadOpen, Op, Phase, Problem, Reshard, Select, ShowsTheModel
from shardproof import ToggleReshard, Trial, UnitsAre, after_chunk
from shardproof.fixtures.heads import TIED_HEAD, TRUNK_AND_HEAD
from shardproof.fixtures.problems import MLP_UNEVEN
from shardproof.suites.params import param, parametrize
from shardproof.suites.sharding_state.states import states
from shardproof.suites.training import train_sharded
from shardproof.suites.vocabulary import PARITY

pytestmark = pytest.mark.worlds(SEVERAL)

INNER = ("layers.0", "layers.1")
ALL = (*INNER, "")
TOLD_TO_FREE, TOLD_TO_KEEP = (0,), (1,)  # the microbatches of ToggleReshard


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Units whose policy is set later, the plan's policy, and the units that only the plan keeps after forward."""

    units: tuple[str, ...]
    reshard: Reshard
    kept: frozenset[str]


@pytest.mark.rows("C12")
@parametrize(
    "told",
    param(
        Told(units=ALL, reshard=Reshard.NATIVE, kept=frozenset({""})),
        id="all-native",
        kills="IgnoresALaterPolicy",
    ),
    param(
        Told(units=("",), reshard=Reshard.KEEP, kept=frozenset(ALL)),
        id="root-keep",
        kills=("IgnoresALaterPolicy", "TellsAllWhatOneWasTold"),
    ),
    param(
        Told(units=("",), reshard=Reshard.AFTER_FORWARD, kept=frozenset()),
        id="root-after_forward",
        kills=("IgnoresALaterPolicy", "TellsAllWhatOneWasTold"),
    ),
)
def test_frees_as_told_last(trial: Trial, told: Told) -> None:
    script = ToggleReshard(units=told.units)
    kept_first = tuple(u for u in ALL if u in told.kept and u not in told.units)
    kept_then = tuple(u for u in ALL if u in told.kept or u in told.units)
    trial.holds(
        train_sharded(MLP_UNEVEN, units=INNER, reshard=told.reshard, microbatches=2, script=script),
        UnitsAre(
            states=(
                *states(AFTER_FORWARD_FREED, unsharded=kept_first, sharded=_others(kept_first)),
                *states(AFTER_FORWARD_KEPT, unsharded=kept_then, sharded=_others(kept_then)),
                *states(AFTER_BACKWARD, sharded=ALL),
            )
        ),
        _gathers_again(len(ALL) - len(kept_first), TOLD_TO_FREE),
        _gathers_again(len(ALL) - len(kept_then), TOLD_TO_KEEP),
        ShowsTheModel(moments=(AFTER_FORWARD_FREED, AFTER_FORWARD_KEPT)),
        *PARITY,
    )


@pytest.mark.rows("T20")
@parametrize(
    "problem, reshard",
    param(TRUNK_AND_HEAD, Reshard.KEEP, id="untied-keep"),
    param(TIED_HEAD, Reshard.AFTER_FORWARD, id="tied-after_forward"),
)
@pytest.mark.kills("FreesHeldUnitsAfterBackward", "ReshardsTheRootAlone")
def test_holds_the_head_through_all_chunks(trial: Trial, problem: Problem, reshard: Reshard) -> None:
    head = next(unit for unit in problem.units if unit.endswith("head"))
    chunks = tuple(after_chunk(chunk) for chunk in range(NUM_CHUNKS))
    trial.holds(
        train_sharded(problem, reshard=reshard, script=HoldHeadOpen(unit=head)),
        UnitsAre(
            states=(
                *(s for moment in chunks for s in states(moment, unsharded=(head,))),
                *states(HoldHeadOpen.freed, sharded=(head,)),
            )
        ),
        ShowsTheModel(moments=(*chunks, HoldHeadOpen.freed)),
        *PARITY,
    )


def _others(units: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(u for u in ALL if u not in units)


def _gathers_again(num_units: int, microbatches: tuple[int, ...]) -> Count:
    select = Select(ops=(Op.ALL_GATHER,), phases=(Phase.BACKWARD,), microbatches=microbatches)
    return Count(select=select, expected=Exactly(num_units))
