"""Gradients kept local until the last microbatch must still add up over all of them."""

from __future__ import annotations

import pytest

from shardproof import Accumulation, NamedOptimizer, Problem, Trial
from shardproof.fixtures.optimizers import ADAMW, SGD
from shardproof.fixtures.problems import MLP_EVEN, MLP_UNEVEN
from shardproof.suites.params import parametrize
from shardproof.suites.training import train
from shardproof.suites.vocabulary import PARITY

# Each problem, each optimizer, and each number of microbatches with each of the others.
CASES: list[tuple[Problem, NamedOptimizer, int]] = [
    (MLP_EVEN, SGD, 3),
    (MLP_UNEVEN, ADAMW, 3),
    (MLP_UNEVEN, SGD, 4),
    (MLP_EVEN, ADAMW, 4),
]


@pytest.mark.rows("T30")
@pytest.mark.kills("KeepsOnlyTheLastMicrobatch", "DoublesGradientsEveryMicrobatch")
@pytest.mark.kills("AssignsWholeGradientsToShards")
@parametrize(
    "problem, optimizer, microbatches",
    *CASES,
    ids=[f"{problem.name}-{optimizer.name}-m{microbatches}" for problem, optimizer, microbatches in CASES],
)
def test_accumulates_every_microbatch(
    trial: Trial, problem: Problem, optimizer: NamedOptimizer, microbatches: int
) -> None:
    training = train(problem, optimizer, accumulation=Accumulation.LAST_MICROBATCH, microbatches=microbatches)
    trial.holds(training, *PARITY)
