"""Hooks on gradients, optimizers in backward, and gradients that the caller edits between backwards."""

from __future__ import annotations

from typing import Any

import pytest

from shardproof import EVEN, FOUR_OR_MORE_EVEN, HOOKED, REDUCED, SEVERAL, Accumulation, ClearPending
from shardproof import Eventful, GradientEdit, Grouping, HoldsBackByTurns, HooksGradients, Interlude, Layout
from shardproof import NamedOptimizer, Notes, Offload, Placement, Reshard, Schedule, Trial
from shardproof.fixtures.optimizers import ADAMW, DECAYING, SGD
from shardproof.fixtures.placements import DIVISIBLE_MLP
from shardproof.fixtures.problems import MLP_EVEN, MLP_UNEVEN
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY

SEES = Notes(subject=HOOKED, value=REDUCED, is_explained=True)
IN_BACKWARD = Schedule(steps_in_backward=True)


@pytest.mark.kills("NeverCallsGradientHooks", "CallsGradientHooksBeforeReducing")
@parametrize(
    "accumulation, times",
    (Accumulation.EVERY_MICROBATCH, 2),
    (Accumulation.LAST_MICROBATCH, 1),
    ids=["every", "last"],
)
def test_hooks_see_each_reduced_gradient_once(trial: Trial, accumulation: Accumulation, times: int) -> None:
    script = HooksGradients(times=times)
    trial.holds(train(MLP_UNEVEN, microbatches=2, accumulation=accumulation, script=script), *PARITY, SEES)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("NeverCallsGradientHooks", "CallsGradientHooksBeforeReducing")
@parametrize("optimizer", SGD, ADAMW, DECAYING)
def test_an_optimizer_in_backward_is_one_after_it(trial: Trial, optimizer: NamedOptimizer) -> None:
    trial.holds(train(MLP_UNEVEN, optimizer, schedule=IN_BACKWARD), *PARITY)


@pytest.mark.kills("NeverCallsGradientHooks")
@parametrize(
    "plan",
    param({"layout": Layout.HYBRID}, id="hybrid", worlds=EVEN),
    param({"offload": Offload.CPU}, id="host"),
    param({"reshard": Reshard.KEEP, "layout": Layout.SHARD}, id="kept"),
)
# Any: as for `train`.
def test_an_optimizer_in_backward_knows_every_layout(trial: Trial, plan: dict[str, Any]) -> None:
    trial.holds(train(MLP_EVEN, schedule=IN_BACKWARD, **plan), *PARITY)


@pytest.mark.kills("AddsToItsOwnGradients")
@parametrize("edit", *GradientEdit)
def test_goes_on_with_gradients_as_the_caller_left_them(trial: Trial, edit: GradientEdit) -> None:
    script = Eventful(moves=((Interlude.BETWEEN, edit),))
    trial.holds(train(MLP_UNEVEN, microbatches=3, script=script), *PARITY)


@pytest.mark.kills("ClearsWhatWaits")
@parametrize(
    "layout, others",
    param(Layout.SHARD, {}, id="shard"),
    param(Layout.SHARD, {"placement": Placement.LARGEST}, id="largest_dim", worlds=EVEN),
    param(Layout.REPLICATE, {}, id="replicate"),
    param(Layout.HYBRID, {}, id="hybrid", worlds=EVEN),
)
def test_clearing_leaves_what_waits_for_its_reduction(
    trial: Trial,
    layout: Layout,
    others: dict[str, Any],  # Any: as for `train`
) -> None:
    accumulation = Accumulation.LAST_MICROBATCH
    script = Eventful(moves=((Interlude.EACH, ClearPending()),))
    training = train(
        DIVISIBLE_MLP, layout=layout, microbatches=3, accumulation=accumulation, script=script, **others
    )
    trial.holds(training, *PARITY)


@pytest.mark.worlds(FOUR_OR_MORE_EVEN)
@pytest.mark.kills("NeverSynchronisesReplicas")
@parametrize("placement", Placement.FIRST, Placement.LARGEST, ids=["rows", "largest_dim"])
@parametrize("clears", False, param(True, kills="ClearsWhatWaits"), ids=["kept", "cleared"])
def test_what_waits_in_part_counts_once(trial: Trial, clears: bool, placement: Placement) -> None:
    script = HoldsBackByTurns(units=(*DIVISIBLE_MLP.units, ""), clears=clears)
    training = train(
        DIVISIBLE_MLP,
        layout=Layout.HYBRID,
        grouping=Grouping.REQUIRED,
        placement=placement,
        microbatches=4,
        script=script,
    )
    trial.holds(training, *PARITY)
