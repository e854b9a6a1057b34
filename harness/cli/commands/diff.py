"""The command ``shardproof diff``: read two runs, compare them, and print or write what changed."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from shardproof.harness.cli.exit_codes import CONFORMS, DOES_NOT_CONFORM
from shardproof.harness.cli.subcommand import Subcommand, add_engine_filter
from shardproof.harness.errors import UsageError
from shardproof.harness.records.run import read_run, write_file

_LEAST_WIDTH = 40  # in narrower terminals every line would wrap several times


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A", help="folder of a run")
    parser.add_argument("after", metavar="B", help="folder of the run to compare it with")
    add_engine_filter(parser, "repeat for several; default: all")
    parser.add_argument(
        "--format",
        choices=("terminal", "markdown", "json"),
        default="terminal",
        help="default: terminal; markdown fits a comment on a pull request, json has every change",
    )
    parser.add_argument("--out", metavar="FILE", help="write it there instead of printing it")


def _run(arguments: argparse.Namespace) -> int:
    """Compare two runs: verdicts, headlines, counts and bytes that changed; returns 1 if any did, else 0."""
    from shardproof.harness.records.diff.comparability import ComparedRun
    from shardproof.harness.records.diff.comparison import compare
    from shardproof.reports.diff_json import render_json
    from shardproof.reports.diff_text import WIDTH, render, render_markdown, summary

    if Path(arguments.before).resolve() == Path(arguments.after).resolve():
        raise UsageError(
            f"diff {arguments.before} {arguments.after}",
            expected="the folders of two runs",
            got="the same folder twice",
            hint="the folder of an earlier run first, and that of a later one second",
        )
    before, after = (
        ComparedRun(folder=folder, run=read_run(Path(folder)))
        for folder in (arguments.before, arguments.after)
    )
    found = compare(before, after, engines=arguments.engine or ())
    renderers = {
        "terminal": lambda found: render(found, width=WIDTH if arguments.out else _width(WIDTH)),
        "markdown": render_markdown,
        "json": render_json,
    }
    text = renderers[arguments.format](found)
    if arguments.out is None:
        print(text, end="")
    else:
        write_file(Path(arguments.out), text)
        print(f"{summary(found)}\nwrote {arguments.out}")
    is_damaged = before.run.is_damaged or after.run.is_damaged
    return DOES_NOT_CONFORM if found.changes or is_damaged else CONFORMS


def _width(most: int) -> int:
    columns = shutil.get_terminal_size(fallback=(most, 24)).columns
    return max(_LEAST_WIDTH, min(most, columns))


COMMAND = Subcommand(help="compare two runs", place=9, add_arguments=_add_arguments, run=_run)
