"""Checkpoints in an engine's own format: training continues as if uninterrupted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardproof import AFTER_FEWER, AFTER_MORE, NamedOptimizer, Offload, Problem, RanksBefore, Resume
from shardproof import Schedule, StateForm, Training, Trial, Tuning
from shardproof.fixtures.optimizers import ADAMW, DECAYING, SGD, Scheduled
from shardproof.fixtures.problems import MLP_BUFFERS, MLP_EVEN, MLP_UNEVEN
from shardproof.fixtures.decoders import TIED
from shardproof.suites.params import param, parametrize
from shardproof.suites.state.worlds_before import STEPS_BEFORE, WORLDS_BEFORE, saved_by
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY

OWN = StateForm.CHECKPOINT


@parametrize(
    "optimizer",
    param(SGD, kills="LosesStateInItsCheckpoint"),
    param(ADAMW, kills=("LosesStateInItsCheckpoint", "RestartsTheCountInItsCheckpoint")),
    param(DECAYING, kills="RestartsTheLearningRateInItsCheckpoint"),
    param(Scheduled(optimizer=ADAMW), kills="LosesWhatAScheduleAddedInItsCheckpoint"),
)
@parametrize("problem", MLP_EVEN, MLP_UNEVEN, TIED)
def test_resumes(trial: Trial, problem: Problem, optimizer: NamedOptimizer) -> None:
    trial.holds(_resumed(problem, optimizer), *PARITY)


@pytest.mark.kills("LosesStateInItsCheckpoint")
def test_resumes_with_buffers(trial: Trial) -> None:
    trial.holds(_resumed(MLP_BUFFERS, SGD), *PARITY)


@pytest.mark.kills("RestoresNoMasters")
def test_resumes_what_is_updated_on_the_host(trial: Trial) -> None:
    """The optimizer updates a copy, from which the parameters are set."""
    trial.holds(_resumed(MLP_UNEVEN, ADAMW, offload=Offload.OPTIMIZER), *PARITY)


@pytest.mark.kills("LosesStateInItsCheckpoint")
def test_resumes_in_turns(trial: Trial) -> None:
    """The ranks' shares are not in rank order."""
    trial.holds(_resumed(MLP_UNEVEN, ADAMW, tuning=Tuning.ROUND_ROBIN), *PARITY)


@parametrize("problem", MLP_UNEVEN, MLP_EVEN)
@parametrize(
    "ranks",
    param(RanksBefore.ONE_MORE, worlds=AFTER_MORE, kills="ReadsTheCheckpointOfItsRank"),
    param(RanksBefore.HALF, worlds=AFTER_FEWER, kills="LosesStateInItsCheckpoint"),
)
def test_goes_on_from_other_ranks(trial: Trial, ranks: RanksBefore, problem: Problem) -> None:
    """Other ranks wrote it, so a share is now in several of its files, or in a part of one."""
    trial.holds(train(problem, ADAMW, origin=saved_by(ranks, OWN)), *PARITY)


@pytest.mark.kills("LosesStateInItsCheckpoint")
@parametrize("ranks", *WORLDS_BEFORE)
def test_goes_on_in_turns_from_other_ranks(trial: Trial, ranks: RanksBefore) -> None:
    """The order of shares depends on the number of ranks."""
    trial.holds(train(MLP_UNEVEN, ADAMW, origin=saved_by(ranks, OWN), tuning=Tuning.ROUND_ROBIN), *PARITY)


# Any: options of a plan, by the names of its fields.
def _resumed(problem: Problem, optimizer: NamedOptimizer, **asked: Any) -> Training:
    """Make a training that goes on in a fresh model, by the same plan, after some steps; it loads, then schedules."""
    schedule = Schedule(steps=STEPS_BEFORE + 2)
    training = train(problem, optimizer, schedule=schedule, **asked)
    resume = Resume(after_steps=STEPS_BEFORE, plan=training.plan, form=OWN)
    return replace(training, resume=replace(resume, schedules_later=isinstance(optimizer, Scheduled)))
