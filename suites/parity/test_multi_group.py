"""One communication group per unit of the model; shapes that no world size divides."""

from __future__ import annotations

from operator import attrgetter

import pytest

from shardproof import Capability, NamedOptimizer, Problem, Trial
from shardproof.fixtures.optimizers import ADAMW, GROUPED, SGD
from shardproof.fixtures.problems import MLP_EVEN, MLP_UNEVEN, TRANSFORMER
from shardproof.suites.params import param, parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import TRAINS

OF_ONE_MICROBATCH = (
    "ForgetsToSynchroniseOneParameter",
    "ComputesWithStaleParameters",
    "SumsInsteadOfAveraging",
)
OF_SEVERAL = ("KeepsOnlyTheLastMicrobatch", "DoublesGradientsEveryMicrobatch")
name = attrgetter("name")


# Each problem with each optimizer, each of both with each number of microbatches.
CASES: list[tuple[Problem, NamedOptimizer, int]] = [
    (MLP_EVEN, SGD, 1),
    (MLP_UNEVEN, ADAMW, 1),
    (MLP_UNEVEN, SGD, 3),
    (MLP_EVEN, ADAMW, 3),
    (MLP_EVEN, SGD, 4),
    (MLP_UNEVEN, ADAMW, 4),
]


@pytest.mark.rows("T08", "R06")
@parametrize(
    "problem, optimizer, microbatches",
    *[
        param(
            *case,
            id=f"{case[0].name}-{case[1].name}-m{case[2]}",
            kills=OF_ONE_MICROBATCH if case[2] == 1 else OF_SEVERAL,
        )
        for case in CASES
    ],
)
def test_trains_the_same_model(
    trial: Trial, problem: Problem, optimizer: NamedOptimizer, microbatches: int
) -> None:
    training = train(problem, optimizer, microbatches=microbatches)
    trial.holds(training, *TRAINS)


@pytest.mark.kills("ForgetsToSynchroniseOneParameter", "DriftsByOneBit")
@parametrize("optimizer", SGD, ADAMW)
def test_trains_the_same_transformer(trial: Trial, optimizer: NamedOptimizer) -> None:
    training = train(TRANSFORMER, optimizer)
    trial.holds(training, *TRAINS)


@pytest.mark.kills("MergesParameterGroups")
@parametrize("problem", MLP_UNEVEN, TRANSFORMER)
def test_trains_with_several_parameter_groups(trial: Trial, problem: Problem) -> None:
    """Each parameter is updated with the options of its own group."""
    trial.holds(train(problem, GROUPED, demands=frozenset({Capability.PARAMETER_SHAPES})), *TRAINS)
