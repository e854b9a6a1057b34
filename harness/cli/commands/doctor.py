"""The command ``shardproof doctor``."""

from __future__ import annotations

import argparse

from shardproof.harness.cli.exit_codes import CONFORMS, OUR_FAULT
from shardproof.harness.cli.subcommand import Subcommand


def _run(arguments: argparse.Namespace) -> int:
    """Report what this machine can run, by running it."""
    from shardproof.harness.cli.machine_examination import examine

    findings = examine()
    for finding in findings:
        print(f"{'ok  ' if finding.is_ok else 'FAIL'} {finding.what}: {finding.detail}")
    return CONFORMS if all(f.is_ok for f in findings) else OUR_FAULT


COMMAND = Subcommand(
    help="report what this machine can run", place=11, add_arguments=lambda parser: None, run=_run
)
