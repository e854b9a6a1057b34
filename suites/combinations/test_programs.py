"""Each row of a covering array trains as one process does, and communicates as often as its program says."""

from __future__ import annotations

import pytest

from shardproof import EVEN, SEVERAL, Program, Trial
from shardproof.fixtures.program_laws import laws_of
from shardproof.fixtures.programs import training_of
from shardproof.suites.combinations.rows import programs_in


def _rows(file: str) -> pytest.MarkDecorator:
    """Parametrize over the rows of a file, named for their lines."""
    rows = programs_in(file)
    return pytest.mark.parametrize("program", rows, ids=[f"{i:03}" for i in range(1, len(rows) + 1)])


@pytest.mark.worlds(SEVERAL)
@_rows("replicas")
def test_loops_of_replicas(trial: Trial, program: Program) -> None:
    trial.holds(training_of(program), *laws_of(program))


@pytest.mark.worlds(SEVERAL)
@_rows("wrapped")
def test_wrapped_units(trial: Trial, program: Program) -> None:
    trial.holds(training_of(program), *laws_of(program))


@pytest.mark.worlds(EVEN)
@_rows("units")
def test_units(trial: Trial, program: Program) -> None:
    trial.holds(training_of(program), *laws_of(program))


@pytest.mark.worlds(EVEN)
@_rows("found")
def test_what_an_engine_once_failed(trial: Trial, program: Program) -> None:
    trial.holds(training_of(program), *laws_of(program))


@pytest.mark.worlds(EVEN)
@_rows("found_wrapped")
def test_what_a_wrapper_once_failed(trial: Trial, program: Program) -> None:
    trial.holds(training_of(program), *laws_of(program))


@pytest.mark.worlds(SEVERAL)
@_rows("found_replicas")
def test_what_replicas_once_failed(trial: Trial, program: Program) -> None:
    trial.holds(training_of(program), *laws_of(program))
