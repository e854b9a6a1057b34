"""The factor of scaled losses follows torch's scaler, and the oracle skips a step that overflows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.amp.grad_scaler import GradScaler

from shardproof import Case, Cell, MatchesOracle, Schedule, TrialSession, WorldSpec
from shardproof.fixtures.optimizers import SGD
from shardproof.fixtures.problems import EXACT_LINEAR
from shardproof.harness.cases.training import LOSS_SCALE, LossScaling, Training
from shardproof.harness.laws.runtime import ScalesLosses
from shardproof.harness.oracle import oracle_answer
from shardproof.harness.oracle.oracle import run_oracle
from shardproof.harness.records.observation import Fact
from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.runner import observations, oracles
from shardproof.harness.runner.observations import Source
from shardproof.harness.runner.options import Keep
from shardproof.harness.worlds.processes.fresh_process import ask
from tests.judging import TWO_STEPS
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


# Large trainings.


BROKEN = "shardproof.engine.mutants.gradient_sync:NeverSynchronises"


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrialSession:
    """Make a session to which every model is large."""
    monkeypatch.setattr(observations, "_MOST_BYTES", 1)
    monkeypatch.setattr(oracles, "_MOST_BYTES_OF_ORACLES", 1)
    return TrialSession(Source(folder=tmp_path, keep=Keep.FAILURES))


def _judge(session: TrialSession, steps: int, engine: str = "torch.ddp") -> Record:
    training = replace(TWO_STEPS, schedule=Schedule(steps=steps))
    case = Case(id=f"{steps} steps of {engine}", training=training, laws=(MatchesOracle(),))
    return session.run(case, Cell(engine=engine, world=WorldSpec.parse("threads:2")), suite="", command="")


def test_observations_of_a_pass_are_deleted_once_others_came(session: TrialSession, tmp_path: Path) -> None:
    for steps in (1, 2, 3):
        assert _judge(session, steps).verdict is Verdict.PASSED
    assert (
        len([*tmp_path.rglob("rank0.observation")]) == 2
    )  # the last, and what the last made the session drop
    assert not [*tmp_path.rglob("oracle-*")]
    assert _judge(session, 1).verdict is Verdict.PASSED
    session.close()
    assert not [*tmp_path.rglob("rank0.observation")]


def test_observations_of_a_failure_are_kept(session: TrialSession, tmp_path: Path) -> None:
    assert _judge(session, 1, BROKEN).verdict is Verdict.FAILED
    for steps in (1, 2, 3):
        assert _judge(session, steps).verdict is Verdict.PASSED
    session.close()
    assert len([*tmp_path.rglob("rank0.observation")]) == 1


def test_the_reference_of_a_large_model_is_computed_again(
    session: TrialSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_computed = 0

    # Any: as they came.
    def counted(*args: Any) -> bytes:
        nonlocal num_computed
        num_computed += 1
        return ask(*args)

    monkeypatch.setattr(oracle_answer, "ask", counted)
    for steps in (1, 1, 2, 1):
        assert _judge(session, steps).verdict is Verdict.PASSED
    assert num_computed == 3
