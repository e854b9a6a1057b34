"""The command ``shardproof timeline``: find a case of a run, and write its timeline for a trace viewer."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from shardproof.harness.cli.exit_codes import CONFORMS, DOES_NOT_CONFORM
from shardproof.harness.cli.subcommand import Subcommand, add_engine_filter
from shardproof.harness.errors import UsageError
from shardproof.harness.records.record import Record
from shardproof.harness.records.run import read_run, write_file

_FILE = "timeline.json"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="DIR", help="folder of the run")
    parser.add_argument("--case", default="", metavar="ID", help="the case, or a part of its name")
    add_engine_filter(parser, "repeat for several; default: any")
    parser.add_argument(
        "--rank", type=int, action="append", metavar="R", help="repeat for several; default: all"
    )
    parser.add_argument("--out", metavar="FILE", help="default: timeline.json in the run's folder")


def _run(arguments: argparse.Namespace) -> int:
    """Write the timeline of one case, the worst that matches, for Perfetto or chrome://tracing."""
    from shardproof.harness.records.rank_timeline import read_timeline
    from shardproof.reports.matrix import by_severity
    from shardproof.reports.perfetto import render

    folder, ranks = Path(arguments.run), arguments.rank or ()
    run = read_run(folder)
    record = _choose(by_severity(run.records), arguments.case, arguments.engine or ())
    timeline = read_timeline(folder / record.observation)
    kept = timeline.of_ranks(lambda rank: not ranks or rank in ranks)
    if not kept.ranks:
        raise UsageError(
            f"timeline of {record.engine} on {record.case}",
            expected=f"journals of rank(s) {list(ranks) or 'of the world'} with events",
            got=f"those of rank(s) {[rank.rank for rank in timeline.ranks]}",
            hint="another --rank, or running the case again with this release",
        )
    out = Path(arguments.out or folder / _FILE)
    write_file(out, render(kept, title=f"{record.engine} in {record.world}: {record.case}"))
    num_races = sum(len(rank.races) for rank in kept.ranks)
    print(f"{record.verdict} {record.engine} in {record.world}: {record.case}")
    print(f"{len(kept.ranks)} rank(s), {len(kept.steps)} step(s), {num_races} race(s)")
    print(f"wrote {out}; open it in https://ui.perfetto.dev or chrome://tracing")
    problems = (*run.problems, *kept.problems) if run.is_damaged else kept.problems
    for problem in problems:
        print(f"warning: {problem}")
    return DOES_NOT_CONFORM if problems else CONFORMS


def _choose(records: Sequence[Record], case: str, engines: Sequence[str]) -> Record:
    """Return the worst record with observations of a case and of these engines; none means any.

    The name of a case takes precedence over a part of a name.
    """
    asked = [r for r in records if not engines or r.engine in engines]
    observed = [r for r in asked if r.observation and case in r.case]
    if found := [r for r in observed if case == r.case] or observed:
        return found[0]
    near = get_close_matches(case, [r.case for r in asked], n=1, cutoff=0.3)
    raise UsageError(
        f"--case {case!r}",
        expected=f"some record of {', '.join(engines) or 'the run'} that was observed",
        got="none",
        hint=f"--case '{near[0]}'" if near else "leaving it out, or another --engine",
    )


COMMAND = Subcommand(help="export one case's timeline", place=8, add_arguments=_add_arguments, run=_run)
