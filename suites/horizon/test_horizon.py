"""Trainings as long, as large and as uneven as those of users, at the least cost that shows a change of behaviour."""

from __future__ import annotations

import pytest

from shardproof import Schedule, Trial
from shardproof.fixtures.horizon import BEYOND_BUCKETS, FAINT, NARROW, WARMED_UP
from shardproof.fixtures.optimizers import EXACT_SGD
from shardproof.suites.training import train
from shardproof.suites.vocabulary import TRAINS

# Engines warm up for a number of steps that somebody chose by hand: a few, ten, some dozen, fifty.
NUM_STEPS = 64


@pytest.mark.kills("StopsSynchronisingAfterWarmUp", "FreezesTheLearningRate")
def test_trains_the_same_model_for_64_steps(trial: Trial) -> None:
    """The learning rate rises over the first steps and then falls."""
    trial.holds(train(NARROW, WARMED_UP, schedule=Schedule(steps=NUM_STEPS)), *TRAINS)


@pytest.mark.kills("ReducesTheFirstMillionElements")
def test_trains_parameters_beyond_common_thresholds(trial: Trial) -> None:
    """Over 2^20 elements in one parameter, 4,096 in each share of a unit, and 25 MiB in all.

    Two steps: DDP arranges its buckets anew after the first.
    """
    trial.holds(train(BEYOND_BUCKETS, schedule=Schedule(steps=2)), *TRAINS)


@pytest.mark.kills("DropsFaintGradients")
def test_reduces_gradients_far_below_the_largest(trial: Trial) -> None:
    """Elements of 2^-24 of the largest arrive in every bit: a tolerance that is relative to the largest hides them."""
    trial.holds(train(FAINT, EXACT_SGD, schedule=Schedule(steps=1)), *TRAINS)
