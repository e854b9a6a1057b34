"""The command ``shardproof list``."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardproof.harness.cli.case_list import list_cases
from shardproof.harness.cli.engine_list import engine_lines
from shardproof.harness.cli.exit_codes import CONFORMS
from shardproof.harness.cli.subcommand import Subcommand
from shardproof.harness.runner.invoke import suite_folders


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", action="store_true", help="list every case too")


def _run(arguments: argparse.Namespace) -> int:
    """List engines with their capabilities, suites, and with --cases every case."""
    print("engines:", *engine_lines(), "suites:", sep="\n")
    for suite in suite_folders():
        print(f"  {suite.name:18} {_first_sentence(suite / '__init__.py')}")
    if not arguments.cases:
        return CONFORMS
    print("cases:")
    return list_cases()


def _first_sentence(module: Path) -> str:
    return module.read_text().strip().strip('"').split("\n", 1)[0]


COMMAND = Subcommand(help="list engines and suites", place=10, add_arguments=_add_arguments, run=_run)
