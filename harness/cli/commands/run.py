"""The command ``shardproof run``."""

from __future__ import annotations

import argparse
import os

from shardproof.harness.cli.judged_cases import judge_cases
from shardproof.harness.cli.parts import resolve_parts, take_up
from shardproof.harness.cli.screen import show_run
from shardproof.harness.cli.subcommand import Subcommand, add_cases, add_effort, add_printed, add_suites
from shardproof.harness.runner import options
from shardproof.harness.runner.launchers import is_launched
from shardproof.harness.worlds.launched.launcher import launched_process


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    options.ENGINE.add_to(parser.add_argument)
    add_suites(parser)
    add_cases(parser)
    parser.add_argument(
        "--case",
        action="append",
        metavar="ID",
        help="only this case, by its id in records; repeat for several",
    )
    for option in options.SHARDS:
        option.add_to(parser.add_argument)
    resume, last_failed = options.REMAINDERS
    group = parser.add_mutually_exclusive_group()
    resume.add_to(group.add_argument)
    last_failed.add_to(group.add_argument, nargs="?", const="", default_text="the newest below conformance/")
    options.WITHIN.add_to(parser.add_argument)
    options.KEEP.add_to(parser.add_argument)
    options.ORACLES.add_to(parser.add_argument)
    add_effort(parser)
    add_printed(parser)
    group = parser.add_mutually_exclusive_group()
    for option in options.KNOWN_FAILURES:
        option.add_to(group.add_argument)


def _run(arguments: argparse.Namespace) -> int:
    """Judge engines on suites: launch worlds, record verdicts, write the reports."""
    resolve_parts(arguments)
    if is_launched(arguments.world):
        done = take_up(arguments, launched_process(os.environ))
        if done is not None:
            return show_run(done, arguments)
    return judge_cases(arguments)


COMMAND = Subcommand(
    help="judge engines",
    place=1,
    add_arguments=_add_arguments,
    run=_run,
    imports_users_code=True,
    joins_launcher=True,
    fills_launcher=True,
)
