"""The command ``shardproof mutants``: run cases on mutants through pytest, and print the kill matrix."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from shardproof.harness.audit.kill_matrix import KillMatrix, Target, kill_matrix
from shardproof.harness.audit.marks import WORLDS, Breadth, read_selection
from shardproof.harness.audit.shipped_mutants import shipped
from shardproof.harness.cli.exit_codes import (
    CONFORMS,
    DOES_NOT_CONFORM,
    OUR_FAULT,
    PYTEST_ENDED,
    PYTEST_USAGE,
    USAGE,
)
from shardproof.harness.cli.subcommand import Subcommand, add_cases, add_suites, new_folder
from shardproof.harness.errors import HarnessBug
from shardproof.harness.records.run import RUN, read_run, refuse_existing
from shardproof.harness.runner.invoke import call_pytest, suites
from shardproof.harness.worlds.spec import WorldSpec


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_suites(parser)
    add_cases(parser, worlds="threads:2, 4, 3, 6 and 1, processes:2, each case in the first that suits it")
    breadth = parser.add_mutually_exclusive_group()
    for flag, chosen, text in (
        ("--full", Breadth.ALL, "every mutant on every case, not only on those that name it"),
        ("--quick", Breadth.ONCE, "every mutant on one case, the cheapest that names it"),
    ):
        breadth.add_argument(flag, dest="breadth", action="store_const", const=chosen, help=text)
    parser.add_argument(
        "--locate",
        action="store_true",
        help="also find where the numbers of each mutant first went wrong, and compare that with what it declares",
    )


def _run(arguments: argparse.Namespace) -> int:
    """Run mutation testing: check that each case kills the mutants that its `kills` marks name; prints the kill matrix.

    Returns 1 if one of them survives, if no case kills a mutant, or if a case kills no mutant.
    """
    return run_mutants(arguments, shipped(), suites(arguments.suite))


def run_mutants(arguments: argparse.Namespace, targets: Sequence[Target], folders: Sequence[Path]) -> int:
    """Run these mutants on the cases of these folders; returns the exit code."""
    from shardproof.reports.kills import places, render, write_kills

    started = time.monotonic()
    out = Path(arguments.out or new_folder("mutants-"))
    refuse_existing(out)
    worlds = tuple(dict.fromkeys(arguments.world or WORLDS))
    for world in worlds:
        WorldSpec.parse(world)
    names = [target.name for target in targets]
    if len(set(names)) < len(names):
        raise HarnessBug("mutants", expected="names of their own", got=", ".join(names), hint="renaming one")
    code = call_pytest(
        [
            *("-p", "shardproof.harness.audit.mutation_plugin"),
            *map(str, folders),
            *(f"--engine={target.engine}" for target in targets),
            *(f"--world={world}" for world in worlds),
            f"--mutants={(arguments.breadth or Breadth.MARKED).value}",
            f"--out={out}",
            f"--deadline={arguments.deadline}",
            *([] if arguments.locate else ["--no-locate"]),
            "--no-expectations",  # an expectation about an honest engine must not excuse a mutant
            *(["-n", str(arguments.workers)] if arguments.workers else []),
            *(["-k", arguments.keyword] if arguments.keyword else []),
        ]
    )
    if code == PYTEST_USAGE:
        return USAGE
    selection = read_selection(out)
    if code not in PYTEST_ENDED or selection is None:
        print("shardproof: the cases could not be run; see the messages above", file=sys.stderr)
        return OUR_FAULT
    if not (selection.pairs or selection.elsewhere or selection.idle):
        print("shardproof: no case was selected; see `shardproof list --cases`", file=sys.stderr)
        return USAGE
    # There is no run if no case had a pair.
    records = read_run(out).records if (out / RUN).exists() else ()
    is_whole = not (arguments.suite or arguments.keyword)
    matrix = kill_matrix(targets, selection, records, is_whole=is_whole)
    for path in write_kills(out, matrix):
        print(f"wrote {path}")
    if arguments.locate:
        print(places(matrix))
    print(render(matrix, duration_s=time.monotonic() - started))
    return code_of_matrix(matrix)


def code_of_matrix(matrix: KillMatrix) -> int:
    """Return the exit code for the matrix; a fault of the harness takes precedence over survivors."""
    if matrix.unknown:
        return OUR_FAULT
    return CONFORMS if matrix.is_proven else DOES_NOT_CONFORM


COMMAND = Subcommand(
    help="run mutation testing of the suites",
    place=13,
    add_arguments=_add_arguments,
    run=_run,
    imports_users_code=True,
    joins_launcher=True,
)
