"""After forward units are gathered or freed as planned; after backward all are freed, in every step."""

from __future__ import annotations

from typing import Any

import pytest

from shardproof import AFTER_BACKWARD, AFTER_FORWARD, BEFORE_BACKWARD, BEFORE_FORWARD, FOUR_OR_MORE_EVEN
from shardproof import POWERS_OF_TWO, SEVERAL, AlternateHeads, Count, Exactly, Law, Layout, LookAround
from shardproof import Nothing, OnlyThese, Op, Phase, Problem, Reshard, Select, ShowsTheModel, Training, Trial
from shardproof import UnitsAre, Window
from shardproof.fixtures.heads import TWO_HEADS
from shardproof.fixtures.problems import MLP_EVEN, MLP_UNEVEN
from shardproof.suites.params import param, parametrize
from shardproof.suites.sharding_state.states import states
from shardproof.suites.training import train_sharded
from shardproof.suites.vocabulary import PARITY

pytestmark = pytest.mark.worlds(SEVERAL)

# Every step, the first included: no state of a step may change what the next one gathers.
GATHERS = Select(ops=(Op.ALL_GATHER,), window=Window.TRAINING)
GATHERS_IN_FORWARD = Select(ops=(Op.ALL_GATHER,), phases=(Phase.FORWARD,), window=Window.TRAINING)
GATHERS_IN_BACKWARD = Select(ops=(Op.ALL_GATHER,), phases=(Phase.BACKWARD,), window=Window.TRAINING)
FROM_PAIRS = Select(ops=(Op.ALL_GATHER,), phases=(Phase.BACKWARD,), window=Window.TRAINING, group_size=2)
INNER = ("layers.0", "layers.1")  # the root owns the other layers
ALL = (*INNER, "")
MOMENTS = (BEFORE_FORWARD, AFTER_FORWARD, AFTER_BACKWARD)
SHARDED_ALWAYS = tuple(state for moment in MOMENTS for state in states(moment, sharded=ALL))


# Any: as for `train`.
def _training(script: LookAround, *, problem: Problem = MLP_UNEVEN, **asked: Any) -> Training:
    return train_sharded(problem, **{"units": INNER, "script": script, **asked})


def _laws(moments: tuple[str, ...]) -> tuple[Law, ...]:
    return (ShowsTheModel(moments=moments), *PARITY)


@pytest.mark.rows("T03", "T04", "T05")
@parametrize(
    "reshard, kept",
    param(
        Reshard.AFTER_FORWARD,
        (),
        id="after_forward",
        kills=("KeepsRootsWhateverAsked", "FreesInTheFirstStepAlone", "LeaksAfterBackward"),
    ),
    param(Reshard.KEEP, ALL, id="keep", kills="FreesWhatItWasAskedToKeep"),
    param(Reshard.NATIVE, ("",), id="native", kills="FreesTheRootByDefault"),
)
def test_shows_what_the_policy_says(trial: Trial, reshard: Reshard, kept: tuple[str, ...]) -> None:
    trial.holds(
        _training(LookAround(), reshard=reshard),
        UnitsAre(
            states=(
                *states(BEFORE_FORWARD, sharded=ALL),
                *states(AFTER_FORWARD, unsharded=kept, sharded=tuple(u for u in ALL if u not in kept)),
                *states(AFTER_BACKWARD, sharded=ALL),
            )
        ),
        Count(select=GATHERS_IN_FORWARD, expected=Exactly(len(ALL))),
        Count(select=GATHERS_IN_BACKWARD, expected=Exactly(len(ALL) - len(kept))),
        *_laws(MOMENTS),
    )


@pytest.mark.rows("T03", "T04")
@pytest.mark.kills("FreesTheRootByDefault")
def test_keeps_a_single_group_by_default(trial: Trial) -> None:
    trial.holds(
        _training(LookAround(), units=()),
        UnitsAre(
            states=(
                *states(BEFORE_FORWARD, sharded=("",)),
                *states(AFTER_FORWARD, unsharded=("",)),
                *states(AFTER_BACKWARD, sharded=("",)),
            )
        ),
        Count(select=GATHERS, expected=Exactly(1)),
        *_laws(MOMENTS),
    )


@pytest.mark.rows("T03", "T04", "C01")
@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
@pytest.mark.kills("FreesWholeWhereAPartWasAsked", "KeepsRootsWhateverAsked")
@parametrize("problem", param(MLP_EVEN, id="even", worlds=POWERS_OF_TWO), param(MLP_UNEVEN, id="uneven"))
def test_gathers_again_from_pairs(trial: Trial, problem: Problem) -> None:
    trial.holds(
        _training(LookAround(), problem=problem, reshard=Reshard.TO_PAIRS),
        UnitsAre(states=SHARDED_ALWAYS),
        Count(select=GATHERS_IN_FORWARD, expected=Exactly(len(ALL))),
        Count(select=FROM_PAIRS, expected=Exactly(len(ALL))),
        Count(select=GATHERS, expected=Exactly(2 * len(ALL))),
        *_laws(MOMENTS),
    )


@pytest.mark.rows("C12")
@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
@pytest.mark.kills("KeepsPartsUnderAnotherPolicy")
def test_a_policy_may_change_between_forward_and_backward(trial: Trial) -> None:
    trial.holds(
        _training(LookAround(changes=ALL), reshard=Reshard.TO_PAIRS), UnitsAre(states=SHARDED_ALWAYS), *PARITY
    )


@pytest.mark.rows("C07", "T03")
@pytest.mark.kills("ReshardsTheRootAlone")
def test_gathers_again_what_was_freed_by_hand(trial: Trial) -> None:
    trial.holds(
        _training(LookAround(frees=ALL), reshard=Reshard.KEEP),
        UnitsAre(
            states=(
                *states(AFTER_FORWARD, unsharded=ALL),
                *states(BEFORE_BACKWARD, sharded=ALL),
                *states(AFTER_BACKWARD, sharded=ALL),
            )
        ),
        Count(select=GATHERS_IN_FORWARD, expected=Exactly(len(ALL))),
        Count(select=GATHERS_IN_BACKWARD, expected=Exactly(len(ALL))),
        *_laws((*MOMENTS, BEFORE_BACKWARD)),
    )


@pytest.mark.rows("R02", "R03")
@pytest.mark.kills("ReshardsTheRootAlone", "LeaksAfterBackward")
def test_shows_replicas_whole_until_freed(trial: Trial) -> None:
    trial.holds(
        _training(LookAround(frees=ALL), layout=Layout.REPLICATE),
        UnitsAre(
            states=(
                *states(BEFORE_FORWARD, sharded=ALL),
                *states(AFTER_FORWARD, unsharded=ALL),
                *states(BEFORE_BACKWARD, sharded=ALL),
                *states(AFTER_BACKWARD, sharded=ALL),
            )
        ),
        Nothing(select=GATHERS),
        *_laws((*MOMENTS, BEFORE_BACKWARD)),
    )


@pytest.mark.rows("T04", "R03")
@pytest.mark.kills("FreesOnlyWhatGotGradients")
@parametrize("layout", Layout.SHARD, Layout.REPLICATE)
def test_frees_what_backward_never_entered(trial: Trial, layout: Layout) -> None:
    reshard = Reshard.KEEP if layout is Layout.SHARD else Reshard.NATIVE
    groups = (*TWO_HEADS.units, "")
    trial.holds(
        train_sharded(TWO_HEADS, layout=layout, reshard=reshard, script=AlternateHeads()),
        UnitsAre(states=(*states(AFTER_FORWARD, unsharded=groups), *states(AFTER_BACKWARD, sharded=groups))),
        OnlyThese(selects=(GATHERS_IN_FORWARD,), among=GATHERS),
        *_laws((AFTER_FORWARD, AFTER_BACKWARD)),
    )
