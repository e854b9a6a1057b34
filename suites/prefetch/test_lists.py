"""Lists of units to prefetch decide which gathers start early, and their order; the trained model is the same.

A gather that forward requested early is issued during another unit's forward. In backward it comes before the
reductions that it should overlap. Orders are complete, in the terms of torch's own tests: a unit is gathered (unshard),
freed (reshard), and its gradients reduced (post-backward). A call without effect is invisible from outside; torch's own
tests count a post-backward without a reduction. Frees show in the parameters of modules. In forward without a list an
engine may prefetch, so frees have an order of their own there. The root's inputs need no gradient, so nothing shows
when its backward ends: an engine may reduce as soon as all its gradients are there, and free it later.
"""

from __future__ import annotations

import pytest

from shardproof import SEVERAL, Event, Gathers, Layout, Order, Prefetch, Problem, Reduces, Reshard, Reshards
from shardproof import Together, Training, Trial, Watch
from shardproof.fixtures.chain import CHAIN, CHECKPOINTED_CHAIN, NESTED_CHAIN
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train, train_sharded
from shardproof.suites.vocabulary import IN_BACKWARD, IN_FORWARD, PARITY

ROOT = ""
B0, B1, B2, B3 = UNITS = CHAIN.units
I0, N0, I1, N1, I2, N2 = NESTED_CHAIN.units
END = Together(frozenset({Reshards(ROOT), Reduces(ROOT)}))
JOINT = ("blocks.0", "blocks.1,blocks.2", "blocks.3")

ONE_AHEAD = (
    *(Gathers(ROOT), Gathers(B0), Gathers(B1, B0), Reshards(B0), Gathers(B2, B1), Reshards(B1)),
    *(Gathers(B3, B2), Reshards(B2), Reshards(B3), Reshards(ROOT)),
)
TWO_AHEAD = (
    *(Gathers(ROOT), Gathers(B0), Gathers(B1, B0), Gathers(B2, B0), Reshards(B0)),
    *(Gathers(B3, B1), Reshards(B1), Reshards(B2), Reshards(B3), Reshards(ROOT)),
)
ONE_BEHIND = (
    *(Gathers(ROOT), Gathers(B3), Gathers(B2, B3), Reshards(B3), Reduces(B3)),
    *(Gathers(B1, B2), Reshards(B2), Reduces(B2), Gathers(B0, B1), Reshards(B1), Reduces(B1)),
    *(Reshards(B0), Reduces(B0), END),
)
TWO_BEHIND = (
    *(Gathers(ROOT), Gathers(B3), Gathers(B2, B3), Gathers(B1, B3), Reshards(B3), Reduces(B3)),
    *(Gathers(B0, B2), Reshards(B2), Reduces(B2), Reshards(B1), Reduces(B1)),
    *(Reshards(B0), Reduces(B0), END),
)
# The inner unit of the last block is on no list: the recomputation that needs it gathers it.
INSIDE_CHECKPOINTS = (
    *(Gathers(ROOT), Gathers(N2), Gathers(N1, N2), Gathers(I1, N2), Gathers(I2, I2)),
    *(Reshards(I2), Reduces(I2), Reshards(N2), Reduces(N2), Gathers(N0, N1), Gathers(I0, N1)),
    *(Reshards(I1), Reduces(I1), Reshards(N1), Reduces(N1)),
    *(Reshards(I0), Reduces(I0), Reshards(N0), Reduces(N0), END),
)
J0, J1, J2 = JOINT
JOINTLY = (
    *(Gathers(ROOT), Gathers(J2), Gathers(J1, B3), Reshards(J2), Reduces(J2)),
    *(Gathers(J0, B2), Reshards(J1), Reduces(J1)),
    *(Reshards(J0), Reduces(J0), END),
)


@pytest.mark.rows("C14")
@pytest.mark.worlds(SEVERAL)
@parametrize(
    "distance, ahead",
    param(
        1,
        ONE_AHEAD,
        id="one",
        kills=(
            "NeverPrefetches",
            "PrefetchesOneTooFar",
            "FreesUnitsTogether",
        ),
    ),
    param(
        2,
        TWO_AHEAD,
        id="two",
        kills=("NeverPrefetches", "PrefetchesOneTooFar", "SwapsPrefetchesOnTheLastRank"),
    ),
)
def test_forward_gathers_ahead_as_listed(
    trial: Trial, distance: int, ahead: tuple[Event | Together, ...]
) -> None:
    trial.holds(
        _training(CHECKPOINTED_CHAIN, Prefetch.by_distance(UNITS, forward=distance)),
        Order(select=IN_FORWARD, events=ahead),
        Order(select=IN_BACKWARD, events=ONE_BEHIND),  # without a list, as with one of each unit before
        *PARITY,
    )


@pytest.mark.rows("C15")
@pytest.mark.worlds(SEVERAL)
@parametrize(
    "distance, behind",
    param(
        1, ONE_BEHIND, id="one", kills=("NeverPrefetches", "PrefetchesOneTooFar", "KeepsMistakenPrefetches")
    ),
    param(
        2,
        TWO_BEHIND,
        id="two",
        kills=("NeverPrefetches", "PrefetchesOneTooFar", "SwapsPrefetchesOnTheLastRank"),
    ),
)
def test_backward_gathers_ahead_as_listed(
    trial: Trial, distance: int, behind: tuple[Event | Together, ...]
) -> None:
    trial.holds(
        _training(CHECKPOINTED_CHAIN, Prefetch.by_distance(UNITS, backward=distance)),
        Order(select=IN_FORWARD, events=tuple(Gathers(unit) for unit in (ROOT, *UNITS))),
        Order(select=IN_FORWARD, events=tuple(Reshards(unit) for unit in (*UNITS, ROOT))),
        Order(select=IN_BACKWARD, events=behind),
        *PARITY,
    )


@pytest.mark.rows("C16")
@pytest.mark.kills("NeverPrefetches", "SwapsPrefetchesOnTheLastRank")
@pytest.mark.worlds(SEVERAL)
def test_lists_hold_inside_checkpoints(trial: Trial) -> None:
    prefetch = Prefetch(backward=((N2, (N1, I1)), (N1, (N0, I0))))
    training = _training(NESTED_CHAIN, prefetch, NESTED_CHAIN.units)
    trial.holds(training, Order(select=IN_BACKWARD, events=INSIDE_CHECKPOINTS), *PARITY)


@pytest.mark.rows("C17")
@pytest.mark.kills("NeverPrefetches")
@pytest.mark.worlds(SEVERAL)
def test_groups_of_several_modules_prefetch_like_one(trial: Trial) -> None:
    training = _training(CHAIN, Prefetch.by_distance(JOINT, backward=1), JOINT)
    trial.holds(
        training,
        Order(select=IN_FORWARD, events=tuple(Gathers(unit) for unit in (ROOT, *JOINT))),
        Order(select=IN_BACKWARD, events=JOINTLY),
        *PARITY,
    )


@pytest.mark.rows("C19")
@pytest.mark.kills("KeepsMistakenPrefetches", "PrefetchesStaleParameters", "TakesUnusedPrefetchesAsCurrent")
@pytest.mark.worlds(SEVERAL)
def test_a_wrong_hint_costs_no_correctness(trial: Trial) -> None:
    # When the first block's backward requests the last one, that one's backward is over.
    trial.holds(_training(CHAIN, Prefetch(backward=((B0, (B3,)), (B3, (B0,))))), *PARITY)


@pytest.mark.rows("T14", "R10")
@pytest.mark.kills("PrefetchesStaleParameters")
@parametrize("layout", Layout.SHARD, Layout.REPLICATE)
def test_lists_change_nothing_that_is_learnt(trial: Trial, layout: Layout) -> None:
    prefetch = Prefetch.by_distance(UNITS, forward=2, backward=2)
    trial.holds(train(CHAIN, layout=layout, units=UNITS, prefetch=prefetch), *PARITY)


def _training(problem: Problem, prefetch: Prefetch, units: tuple[str, ...] = UNITS) -> Training:
    return train_sharded(
        problem, units=units, reshard=Reshard.AFTER_FORWARD, prefetch=prefetch, watch=frozenset({Watch.UNITS})
    )
