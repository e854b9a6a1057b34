"""Observations and references of large models do not accumulate in memory or on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardproof import Case, Cell, MatchesOracle, Schedule, TrialSession, WorldSpec
from shardproof.harness.oracle import oracle_answer
from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.runner import observations, oracles
from shardproof.harness.runner.observations import Source
from shardproof.harness.runner.options import Keep
from shardproof.harness.worlds.processes.fresh_process import ask
from tests.judging import TWO_STEPS

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
