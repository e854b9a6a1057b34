"""Hooks on gradients, optimizers in backward, and gradients that the caller edits between backwards."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import pytest

from shardproof import (
    EVEN,
    HOOKED,
    REDUCED,
    SEVERAL,
    Accumulation,
    Capability,
    ClearsWhileHeldBack,
    EditsGradients,
    GradientEdit,
    HooksGradients,
    Layout,
    MatchesOracle,
    NamedOptimizer,
    Notes,
    Offload,
    Placement,
    RanksAgree,
    Reshard,
    Schedule,
    Trial,
)
from shardproof.fixtures.optimizers import ADAMW, SGD
from shardproof.fixtures.placements import DIVISIBLE_MLP
from shardproof.fixtures.problems import MLP_EVEN, MLP_UNEVEN
from shardproof.suites.training import train

LAWS = (MatchesOracle(), RanksAgree())
SEES = Notes(subject=HOOKED, value=REDUCED, is_explained=True)
HOOKS = frozenset({Capability.GRADIENT_HOOKS})
IN_BACKWARD = Schedule(steps_in_backward=True)


@pytest.mark.kills("NeverCallsGradientHooks", "CallsGradientHooksBeforeReducing")
@pytest.mark.parametrize(
    ("accumulation", "times"),
    [(Accumulation.EVERY_MICROBATCH, 2), (Accumulation.LAST_MICROBATCH, 1)],
    ids=["every", "last"],
)
def test_hooks_see_each_reduced_gradient_once(trial: Trial, accumulation: Accumulation, times: int) -> None:
    script = HooksGradients(times=times)
    trial.holds(train(MLP_UNEVEN, microbatches=2, accumulation=accumulation, script=script), *LAWS, SEES)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("NeverCallsGradientHooks", "CallsGradientHooksBeforeReducing")
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=attrgetter("name"))
def test_an_optimizer_in_backward_is_one_after_it(trial: Trial, optimizer: NamedOptimizer) -> None:
    trial.holds(train(MLP_UNEVEN, optimizer, schedule=IN_BACKWARD, demands=HOOKS), *LAWS)


@pytest.mark.kills("NeverCallsGradientHooks")
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param({"layout": Layout.HYBRID}, id="hybrid", marks=pytest.mark.worlds(EVEN)),
        pytest.param({"offload": Offload.CPU}, id="host"),
        pytest.param({"reshard": Reshard.KEEP, "layout": Layout.SHARD}, id="kept"),
    ],
)
# Any: as for `train`.
def test_an_optimizer_in_backward_knows_every_layout(trial: Trial, plan: dict[str, Any]) -> None:
    trial.holds(train(MLP_EVEN, schedule=IN_BACKWARD, demands=HOOKS, **plan), *LAWS)


@pytest.mark.kills("AddsToItsOwnGradients")
@pytest.mark.parametrize("edit", GradientEdit, ids=lambda edit: edit.name.lower())
def test_goes_on_with_gradients_as_the_caller_left_them(trial: Trial, edit: GradientEdit) -> None:
    trial.holds(train(MLP_UNEVEN, microbatches=3, script=EditsGradients(edit=edit)), *LAWS)


@pytest.mark.kills("ClearsWhatWaits")
@pytest.mark.parametrize(
    ("layout", "others"),
    [
        pytest.param(Layout.SHARD, {}, id="shard"),
        pytest.param(
            Layout.SHARD, {"placement": Placement.LARGEST}, id="largest_dim", marks=pytest.mark.worlds(EVEN)
        ),
        pytest.param(Layout.REPLICATE, {}, id="replicate"),
        pytest.param(Layout.HYBRID, {}, id="hybrid", marks=pytest.mark.worlds(EVEN)),
    ],
)
def test_clearing_leaves_what_waits_for_its_reduction(
    trial: Trial,
    layout: Layout,
    others: dict[str, Any],  # Any: as for `train`
) -> None:
    accumulation = Accumulation.LAST_MICROBATCH
    script = ClearsWhileHeldBack()
    training = train(
        DIVISIBLE_MLP, layout=layout, microbatches=3, accumulation=accumulation, script=script, **others
    )
    trial.holds(training, *LAWS)
