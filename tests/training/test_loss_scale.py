"""The factor of scaled losses follows torch's scaler, and the oracle skips a step that overflows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.amp.grad_scaler import GradScaler

from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.problems import EXACT_LINEAR
from shardproof.harness.cases.training import LOSS_SCALE, LossScaling, Schedule, Training
from shardproof.harness.laws.runtime import ScalesLosses
from shardproof.harness.oracle.oracle import run_oracle
from shardproof.harness.records.observation import Fact
from tests.simulated_engine import evidence_of, simulate

SCALING = LossScaling(init_scale=8.0, growth_interval=2, overflows_at=3)
SKIPPING = replace(SCALING, overflows_at=1)
TRAINING = Training(
    problem=EXACT_LINEAR,
    optimizer=SGD,
    schedule=Schedule(steps=3, scaling=SKIPPING),
)


def test_the_factor_takes_the_course_of_torchs_scaler() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = GradScaler("cpu", init_scale=SCALING.init_scale, growth_interval=SCALING.growth_interval)
    for step in range(8):
        scaler.scale(parameter.sum()).backward()
        if step == SCALING.overflows_at and parameter.grad is not None:
            parameter.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == SCALING.after(step)


def test_the_oracle_skips_the_step_and_shows_no_gradients_of_it() -> None:
    steps = run_oracle(TRAINING, 2).steps
    for name, parameter in steps[1].parameters.items():
        assert torch.equal(parameter, steps[0].parameters[name])
        assert not torch.equal(parameter, steps[2].parameters[name])
    assert (steps[1].gradients, steps[1].norm) == ({}, None)
    assert steps[2].gradients


@pytest.mark.parametrize(
    ("rank", "step", "value", "words"),
    [
        (
            1,
            1,
            "8.0",
            "step 1, rank 1: expected the loss scale 4.0, got 8.0 (the last rank overflows in step 1)",
        ),
        (0, 0, "4.0", "step 0, rank 0: expected the loss scale 8.0, got 4.0"),
        (0, 2, None, "step 2, rank 0: expected the loss scale 4.0, got nothing"),
    ],
    ids=["a rank that did not skip", "a rank that skipped", "a rank that noted nothing"],
)
def test_ranks_that_part_are_named(rank: int, step: int, value: str | None, words: str) -> None:
    def noted(of_rank: int, of_step: int) -> tuple[Fact, ...]:
        is_wrong = (of_rank, of_step) == (rank, step)
        found = value if is_wrong else str(SKIPPING.after(of_step))
        return () if found is None else (Fact(moment="", subject=LOSS_SCALE, value=found),)

    plain = simulate(replace(TRAINING, schedule=Schedule(steps=3)), 2)
    ranks = tuple(
        replace(o, steps=tuple(replace(s, facts=noted(o.rank, i)) for i, s in enumerate(o.steps)))
        for o in plain
    )
    record = ScalesLosses(scaling=SKIPPING).judge(evidence_of(TRAINING, 2, ranks=ranks)).record
    assert not record.held
    assert record.summary.startswith(words)


def test_a_scale_needs_a_step_after_backward() -> None:
    schedule = Schedule(scaling=LossScaling())
    assert replace(TRAINING, schedule=schedule).schedule is schedule
    with pytest.raises(ValueError, match="leave steps_in_backward out"):
        replace(TRAINING, schedule=replace(schedule, steps_in_backward=True))
