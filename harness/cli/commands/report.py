"""The command ``shardproof report``."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardproof.harness.cli.screen import show_run
from shardproof.harness.cli.subcommand import Subcommand, add_printed


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="DIR", help="folder of the run")
    add_printed(parser)


def _run(arguments: argparse.Namespace) -> int:
    """Write the reports of a run again and print its matrix."""
    return show_run(Path(arguments.run), arguments)


COMMAND = Subcommand(help="write a run's reports again", place=5, add_arguments=_add_arguments, run=_run)
