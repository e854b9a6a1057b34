"""The norm by which an engine clipped is compared with that of the gradients that all ranks show together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardproof import Clip, Layout, Plan, Schedule, Training
from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.problems import MLP_EVEN
from shardproof.harness.laws.own_norm import ClipsByTheirNorm
from shardproof.harness.records.observation import Observation
from tests.simulated_engine import evidence_of, oracle_of, simulate


def _training(max_norm: float, norm_type: float = 2.0) -> Training:
    schedule = Schedule(steps=1, clip=Clip(max_norm=max_norm, norm_type=norm_type))
    return Training(problem=MLP_EVEN, optimizer=SGD, plan=Plan(layout=Layout.SHARD), schedule=schedule)


def _clipped(observation: Observation, training: Training, change: float = 1.0) -> Observation:
    """Return a rank with the oracle's norms times a factor, and gradients clipped by these."""
    clip = training.schedule.clip
    assert clip is not None
    steps = []
    for step, of_oracle in zip(observation.steps, oracle_of(training, 2).steps, strict=True):
        assert of_oracle.norm is not None
        norm = float(of_oracle.norm) * change
        scale = min(1.0, clip.max_norm / (norm + 1e-6))
        gradients = {
            name: None if shard is None else replace(shard, tensor=shard.tensor * scale)
            for name, shard in step.gradients.items()
        }
        steps.append(replace(step, norm=norm, gradients=gradients))
    return replace(observation, steps=tuple(steps))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.05, 1e6], ids=["clipped", "as it was"])
def test_a_norm_in_few_bits_is_wrong(max_norm: float, norm_type: float) -> None:
    training = _training(max_norm, norm_type)
    first, second = simulate(training, 2)
    ranks = (_clipped(first, training), _clipped(second, training))
    held = ClipsByTheirNorm().judge(evidence_of(training, ranks=ranks)).record
    assert held.held, held.summary
    assert held.summary == "of 2 norms"
    worse = tuple(_clipped(rank, training, 1 + 2**-9) for rank in (first, second))
    record = ClipsByTheirNorm().judge(evidence_of(training, ranks=worse)).record
    assert not record.held
    assert record.summary.startswith("step 0, rank 0: expected ")


def test_gradients_that_no_rank_shows_whole_have_no_norm() -> None:
    training = _training(0.05)
    first, second = (_clipped(o, training) for o in simulate(training, 2))
    lacking = replace(
        second,
        steps=tuple(replace(step, gradients=dict.fromkeys(step.gradients)) for step in second.steps),
    )
    record = ClipsByTheirNorm().judge(evidence_of(training, ranks=(first, lacking))).record
    assert record.summary == "of 0 norms"


def test_rounding_in_the_gradients_own_dtype_is_allowed() -> None:
    training = _training(1e6)
    ranks = tuple(
        _clipped(o, training, 1 + 2 * torch.finfo(torch.float32).eps) for o in simulate(training, 2)
    )
    assert ClipsByTheirNorm().judge(evidence_of(training, ranks=ranks)).record.held
