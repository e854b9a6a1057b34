"""Each row of a covering array trains as one process does, and communicates as often as its program says."""

from __future__ import annotations

import pytest

from shardproof import EVEN, SEVERAL, Program, Trial
from shardproof.fixtures.program_laws import laws_of
from shardproof.fixtures.programs import training_of
from shardproof.suites.combinations.rows import FAMILIES, rows_in


def _rows(file: str) -> pytest.MarkDecorator:
    """Parametrize over the rows of a file, named for their places; a row of an array kills what is noted beside it."""
    rows = [
        pytest.param(
            program,
            id=f"{i:03}",
            marks=pytest.mark.kills(*notes.split()) if file in FAMILIES and notes else (),
        )
        for i, (program, notes) in enumerate(rows_in(file), start=1)
    ]
    return pytest.mark.parametrize("program", rows)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("HalvesTheLastRank")
@_rows("replicas")
def test_loops_of_replicas(trial: Trial, program: Program) -> None:
    trial.holds(training_of(program), *laws_of(program))


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("HalvesTheLastRankOfWrappers")
@_rows("wrapped")
def test_wrapped_units(trial: Trial, program: Program) -> None:
    trial.holds(training_of(program), *laws_of(program))


@pytest.mark.worlds(EVEN)
@pytest.mark.kills("HalvesTheLastRank")
@_rows("units")
def test_units(trial: Trial, program: Program) -> None:
    trial.holds(training_of(program), *laws_of(program))


@pytest.mark.worlds(EVEN)
@pytest.mark.kills("HalvesTheLastRank")
@_rows("found")
def test_what_an_engine_once_failed(trial: Trial, program: Program) -> None:
    trial.holds(training_of(program), *laws_of(program))


@pytest.mark.worlds(EVEN)
@pytest.mark.kills("HalvesTheLastRankOfWrappers")
@_rows("found_wrapped")
def test_what_a_wrapper_once_failed(trial: Trial, program: Program) -> None:
    trial.holds(training_of(program), *laws_of(program))


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("HalvesTheLastRank")
@_rows("found_replicas")
def test_what_replicas_once_failed(trial: Trial, program: Program) -> None:
    trial.holds(training_of(program), *laws_of(program))
