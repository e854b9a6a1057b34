"""Buffers have the changes of this rank's own forwards, in training and in evaluation."""

from __future__ import annotations

import pytest

from shardproof import EVEN, SEVERAL, Capability, Evaluation, Eventful, Interlude, Layout, Trial
from shardproof.fixtures.buffered import MASKED, NORMALISED, REPLACED
from shardproof.suites.params import parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY

OWN = frozenset({Capability.OWN_BUFFERS})


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("GivesAllRanksTheBuffersOfOne", "ForgetsUnsavedBuffers")
@parametrize("microbatches", 1, 3, ids="m{}".format)
def test_keeps_the_statistics_of_each_rank(trial: Trial, microbatches: int) -> None:
    trial.holds(train(NORMALISED, demands=OWN, microbatches=microbatches), *PARITY)


@pytest.mark.kills("EvaluatesWithStaleParameters")
def test_evaluates_between_steps(trial: Trial) -> None:
    """Evaluation uses this rank's statistics and the newest parameters, and training continues."""
    trial.holds(
        train(NORMALISED, demands=OWN, script=Eventful(moves=((Interlude.BEFORE, Evaluation.NO_GRAD),))),
        *PARITY,
    )


@pytest.mark.kills("KeepsReplacedBuffers")
def test_keeps_what_forward_put_in_place_of_a_buffer(trial: Trial) -> None:
    training = train(REPLACED)
    trial.holds(training, *PARITY)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("ForgetsUnsavedBuffers")
def test_keeps_a_mask_of_infinities(trial: Trial) -> None:
    trial.holds(train(MASKED), *PARITY)


@pytest.mark.worlds(EVEN)
@pytest.mark.kills("ForgetsUnsavedBuffers")
def test_starts_all_replicas_from_the_model_it_is_given(trial: Trial) -> None:
    trial.holds(train(NORMALISED, layout=Layout.HYBRID, demands=OWN), *PARITY)
