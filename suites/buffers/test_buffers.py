"""Buffers are those that this rank's own forwards made, in training and in evaluation."""

from __future__ import annotations

import pytest

from fixtures.buffered import MASKED, NORMALISED, REPLACED
from fixtures.optimizers import SGD
from shardproof import (
    EVEN,
    SEVERAL,
    Capability,
    EvaluatesFirst,
    Layout,
    MatchesOracle,
    Plan,
    RanksAgree,
    Schedule,
    Training,
    Trial,
)

LAWS = (MatchesOracle(), RanksAgree())
OWN = frozenset({Capability.OWN_BUFFERS})


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("GivesAllRanksTheBuffersOfOne", "ForgetsUnsavedBuffers")
@pytest.mark.parametrize("microbatches", [1, 3], ids="m{}".format)
def test_keeps_the_statistics_of_each_rank(trial: Trial, microbatches: int) -> None:
    plan = Plan(units=NORMALISED.units, demands=OWN)
    schedule = Schedule(microbatches=microbatches)
    trial.holds(Training(problem=NORMALISED, optimizer=SGD, plan=plan, schedule=schedule), *LAWS)


@pytest.mark.kills("EvaluatesWithStaleParameters")
def test_evaluates_between_steps(trial: Trial) -> None:
    """What evaluation shows is made of this rank's statistics and the newest parameters, and training goes on."""
    plan = Plan(units=NORMALISED.units, demands=OWN)
    trial.holds(Training(problem=NORMALISED, optimizer=SGD, plan=plan, script=EvaluatesFirst()), *LAWS)


@pytest.mark.kills("KeepsReplacedBuffers")
def test_keeps_what_forward_put_in_place_of_a_buffer(trial: Trial) -> None:
    training = Training(problem=REPLACED, optimizer=SGD, plan=Plan(units=REPLACED.units))
    trial.holds(training, *LAWS)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("ForgetsUnsavedBuffers")
def test_keeps_a_mask_of_infinities(trial: Trial) -> None:
    trial.holds(Training(problem=MASKED, optimizer=SGD, plan=Plan(units=MASKED.units)), *LAWS)


@pytest.mark.worlds(EVEN)
@pytest.mark.kills("StartsReplicasApart", "ForgetsUnsavedBuffers")
def test_starts_all_replicas_from_the_model_it_is_given(trial: Trial) -> None:
    plan = Plan(layout=Layout.HYBRID, units=NORMALISED.units, demands=OWN)
    trial.holds(Training(problem=NORMALISED, optimizer=SGD, plan=plan), *LAWS)
