"""The command ``shardproof locate``: names where the values of a run's cases first went wrong."""

from __future__ import annotations

import argparse
import io
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

from shardproof.harness.cases.case_id import node_of
from shardproof.harness.cli.exit_codes import CONFORMS, DOES_NOT_CONFORM, PYTEST_ENDED
from shardproof.harness.cli.subcommand import Subcommand
from shardproof.harness.errors import UsageError
from shardproof.harness.records.record import Header, Located, Record
from shardproof.harness.records.run import read_run
from shardproof.harness.runner.invoke import call_pytest

_LAW = "matches the oracle"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="DIR", help="folder of the run")
    parser.add_argument(
        "--case",
        action="append",
        metavar="ID",
        help="only this case, by its id in records; repeat for several; default: all with wrong values",
    )


def _run(arguments: argparse.Namespace) -> int:
    """Name where the values of each case first went wrong; trains again what the run has not located itself.

    Returns 1 if some case could not be located.
    """
    run = read_run(Path(arguments.run))
    wrong = [r for r in run.records if any(law.law == _LAW and not law.held for law in r.laws)]
    chosen = [r for r in wrong if arguments.case is None or r.case in arguments.case]
    if missing := sorted(set(arguments.case or ()) - {r.case for r in chosen}):
        known = ", ".join(dict.fromkeys(r.case for r in wrong)) or "none"
        raise UsageError("--case", expected="a case with wrong values", got=", ".join(missing), hint=known)
    is_whole = True
    for record in chosen:
        found = record.located or _trained_again(record, run.header)
        is_whole &= found is not None and found.phase is not None
        print(f"{record.engine} in {record.world}: {record.case}")
        print("\n".join(_lines(found)))
    return CONFORMS if is_whole else DOES_NOT_CONFORM


def _trained_again(record: Record, header: Header) -> Located | None:
    """Judge a case once more, and locate where its values went wrong."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        options = [f"--model={header.options['model']}"] if "model" in header.options else []
        node = node_of(record.case, record.engine, record.world)
        cell = (f"--engine={record.engine}", f"--world={record.world}")
        seed = f"--schedule-seed={header.seed}"
        asked = [node, *cell, *options, seed, f"--out={out}", "--no-expectations", "-qq", "--tb=no"]
        with redirect_stdout(io.StringIO()):  # what pytest says of a case that is to fail
            code = call_pytest(asked)
        records = read_run(out).records if code in PYTEST_ENDED and out.exists() else ()
    return next((r.located for r in records if r.key == record.key), None)


def _lines(found: Located | None) -> Iterator[str]:
    if found is None:
        yield "  the case did not fail again"
        return
    yield f"  {found.sentence}"
    if found.unseen:
        yield f"  {found.unseen}"


COMMAND = Subcommand(
    help="find where wrong values came from",
    place=5,
    add_arguments=_add_arguments,
    run=_run,
    imports_users_code=True,
)
