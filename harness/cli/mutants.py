"""The command ``shardproof mutants``: run cases on mutants through pytest, and print the kill matrix."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardproof.engine.registry import shipped_mutants
from shardproof.harness.audit.kill_matrix import KillMatrix, Target, kill_matrix
from shardproof.harness.audit.marks import Breadth, read_selection
from shardproof.harness.cli.exit_codes import (
    CONFORMS,
    DOES_NOT_CONFORM,
    OUR_FAULT,
    PYTEST_ENDED,
    PYTEST_USAGE,
    USAGE,
)
from shardproof.harness.errors import HarnessBug
from shardproof.harness.records.record import Record, Verdict
from shardproof.harness.records.run import RUN, read_run, refuse_existing
from shardproof.harness.runner.invoke import call_pytest
from shardproof.harness.worlds.spec import WorldSpec
from shardproof.reports.kills import render, write_kills

__all__ = ["MutantsRequest", "code_of_matrix", "run_mutants", "shipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MutantsRequest:
    """The mutants, cases and worlds to run; ``is_whole`` means all suites and no keyword."""

    targets: tuple[Target, ...]
    suites: tuple[Path, ...]
    worlds: tuple[str, ...]
    out: Path
    breadth: Breadth = Breadth.MARKED
    keyword: str = ""
    num_workers: int = 0
    deadline_s: float = 60.0
    is_whole: bool = True


def shipped() -> tuple[Target, ...]:
    """Return the mutants that ship with the suites."""
    return tuple(
        Target(
            name=mutant.name,
            engine=mutant.engine_spec,
            fault=mutant.fault,
            trace=mutant.trace.name,
            verdicts=tuple(str(verdict) for verdict in Verdict if mutant.trace.is_kill(verdict)),
        )
        for mutant in shipped_mutants()
    )


def run_mutants(request: MutantsRequest) -> int:
    """Run the pairs, write and print the kill matrix; returns the exit code."""
    started = time.monotonic()
    refuse_existing(request.out)
    for world in request.worlds:
        WorldSpec.parse(world)
    code = call_pytest(_arguments(request))
    if code == PYTEST_USAGE:
        return USAGE
    selection = read_selection(request.out)
    if code not in PYTEST_ENDED or selection is None:
        print("shardproof: the cases could not be run; see the messages above", file=sys.stderr)
        return OUR_FAULT
    if not (selection.pairs or selection.elsewhere or selection.idle):
        print("shardproof: no case was selected; see `shardproof list --cases`", file=sys.stderr)
        return USAGE
    matrix = kill_matrix(request.targets, selection, _records(request.out), is_whole=request.is_whole)
    for path in write_kills(request.out, matrix):
        print(f"wrote {path}")
    print(render(matrix, duration_s=time.monotonic() - started))
    return code_of_matrix(matrix)


def code_of_matrix(matrix: KillMatrix) -> int:
    """Return the exit code for the matrix; a fault of the harness takes precedence over survivors."""
    if matrix.unknown:
        return OUR_FAULT
    return CONFORMS if matrix.is_proven else DOES_NOT_CONFORM


def _arguments(request: MutantsRequest) -> list[str]:
    names = [target.name for target in request.targets]
    if len(set(names)) < len(names):
        raise HarnessBug("mutants", expected="names of their own", got=", ".join(names), hint="renaming one")
    return [
        *("-p", "shardproof.harness.audit.mutation_plugin"),
        *map(str, request.suites),
        *(f"--engine={target.engine}" for target in request.targets),
        *(f"--world={world}" for world in request.worlds),
        f"--mutants={request.breadth.value}",
        f"--out={request.out}",
        f"--deadline={request.deadline_s}",
        "--no-expectations",  # an expectation about an honest engine must not excuse a mutant
        *(["-n", str(request.num_workers)] if request.num_workers else []),
        *(["-k", request.keyword] if request.keyword else []),
    ]


def _records(out: Path) -> Sequence[Record]:
    """Read the records of the run; there is no run if no case had a pair."""
    return read_run(out).records if (out / RUN).exists() else ()
