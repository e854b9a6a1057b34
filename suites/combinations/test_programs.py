"""Each row of a covering array trains like one process, and communicates as often as its program requires."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

from shardproof import EVEN, FOURS, SEVERAL, Program, Trial
from shardproof.fixtures.programs.model import CUT
from shardproof.fixtures.programs.laws import laws_of
from shardproof.fixtures.programs.training import training_of
from shardproof.suites.combinations.rows import ONCE_FAILED, WITH_OTHER_ROWS, Row, case_of, rows_in


def _rows(file: str) -> pytest.MarkDecorator:
    """Parametrize over the rows of a file; each kills the mutants noted beside it."""
    return pytest.mark.parametrize(
        "program", [pytest.param(row.program, id=row.id, marks=_marks(row)) for row in rows_in(file)]
    )


def _marks(row: Row) -> list[pytest.MarkDecorator]:
    """Return the mutants that a row kills; if its model is cut, also its worlds, and the mutant of such models."""
    marks = [pytest.mark.kills(name) for name in row.mutants]
    match row.program[CUT]:
        case "no":
            return marks
        case "experts":
            return [*marks, pytest.mark.worlds(EVEN), pytest.mark.kills("ScalesExpertsByTheirRanks")]
        case _:
            return [*marks, pytest.mark.worlds(FOURS), pytest.mark.kills("ScalesByTheTensorRanks")]


def _judge(trial: Trial, family: str, program: Program, contains: Sequence[str] = ()) -> None:
    unless = WITH_OTHER_ROWS[family]
    trial.holds(training_of(program), *laws_of(program), unless=unless, contains=contains)


def _judge_row(trial: Trial, family: str, program: Program) -> None:
    """Judge a program of an array; an engine that once failed a part of it may fail it."""
    parts = {
        case_of(found, row): found
        for found in ONCE_FAILED
        for row in _found(found)
        if program.contains(row.program)
    }
    has_others = family == "replicas" and {*parts.values()} - {"found_elsewhere"}
    _judge(trial, "found_replicas" if has_others else family, program, [*parts])


@cache
def _found(file: str) -> list[Row]:
    return rows_in(file)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("HalvesTheLastRank")
@_rows("replicas")
def test_loops_of_replicas(trial: Trial, program: Program) -> None:
    _judge_row(trial, "replicas", program)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("HalvesTheLastRankOfWrappers")
@_rows("wrapped")
def test_wrapped_units(trial: Trial, program: Program) -> None:
    _judge_row(trial, "wrapped", program)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("HalvesTheLastRankOfShares")
@_rows("shares")
def test_shares_of_the_state(trial: Trial, program: Program) -> None:
    _judge_row(trial, "shares", program)


@pytest.mark.worlds(EVEN)
@pytest.mark.kills("HalvesTheLastRank")
@_rows("units")
def test_units(trial: Trial, program: Program) -> None:
    _judge_row(trial, "units", program)


@_rows("cut")
def test_units_of_cut_tensors(trial: Trial, program: Program) -> None:
    _judge_row(trial, "cut", program)


@pytest.mark.worlds(EVEN)
@pytest.mark.kills("HalvesTheLastRank")
@_rows("found_units")
def test_what_an_engine_once_failed(trial: Trial, program: Program) -> None:
    _judge(trial, "units", program)


@pytest.mark.worlds(EVEN)
@pytest.mark.kills("HalvesTheLastRankOfWrappers")
@_rows("found_wrapped")
def test_what_a_wrapper_once_failed(trial: Trial, program: Program) -> None:
    _judge(trial, "wrapped", program)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("HalvesTheLastRank")
@_rows("found_replicas")
def test_what_replicas_once_failed(trial: Trial, program: Program) -> None:
    _judge(trial, "found_replicas", program)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("HalvesTheLastRank")
@_rows("found_elsewhere")
def test_what_replicas_of_other_libraries_once_failed(trial: Trial, program: Program) -> None:
    _judge(trial, "replicas", program)


@pytest.mark.worlds(SEVERAL)
@pytest.mark.kills("HalvesTheLastRankOfShares")
@_rows("found_shares")
def test_what_shares_once_failed(trial: Trial, program: Program) -> None:
    _judge(trial, "shares", program)


@_rows("found_cut")
def test_what_an_engine_of_cut_tensors_once_failed(trial: Trial, program: Program) -> None:
    _judge(trial, "cut", program)
