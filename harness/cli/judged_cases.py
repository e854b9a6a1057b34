"""Judging cases in this process: starts pytest on suites, prints the progress, writes and prints the reports."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from shardproof.engine.registry import BUILT_IN, check_spelling
from shardproof.harness.cases.case_id import node_of
from shardproof.harness.cli.exit_codes import INTERRUPTED, PYTEST_INTERRUPTED, USAGE, code_of_run
from shardproof.harness.cli.screen import show_run
from shardproof.harness.cli.subcommand import effort_of, new_folder
from shardproof.harness.records.provenance import today
from shardproof.harness.records.run import refuse_existing
from shardproof.harness.runner.interruption import uninterrupted
from shardproof.harness.runner.invoke import call_pytest, check_temporary_folder, suites
from shardproof.harness.runner.kill_power import seconds_of
from shardproof.harness.runner.options import DEFAULT_WORLD, pytest_arguments
from shardproof.harness.worlds.spec import WorldSpec

if TYPE_CHECKING:
    from shardproof.harness.records.run import Run


def judge_cases(
    arguments: argparse.Namespace,
    *extra: str,
    render: Callable[[Run], str] | None = None,
    lists_all: bool = False,
) -> int:
    """Run the selected cases on the selected engines in worlds; returns an exit code.

    ``extra`` are arguments for pytest, ``render`` replaces the usual report, and ``lists_all`` prints a line for each
    case.
    """
    from shardproof.harness.cli.progress import CaseProgress
    from shardproof.harness.verdicts import known_failures_file
    from shardproof.harness.worlds.processes.forkserver import draw_hash_seeds, forkserver_context

    out = Path(arguments.out or new_folder())
    # Here rather than in pytest, because its own message would hide ours.
    refuse_existing(out)
    check_temporary_folder()
    file = None if arguments.no_expectations else known_failures_file.find(arguments.expectations)
    if file is not None:
        known_failures_file.read(file, today=today())
    arguments.world = [str(WorldSpec.parse(world)) for world in arguments.world or []]
    seed = effort_of(arguments).seed
    engines = arguments.engine or sorted(BUILT_IN)
    worlds = arguments.world or [DEFAULT_WORLD]
    nodes = [node_of(*cell) for cell in product(arguments.case or (), engines, worlds)]
    paths = nodes or [str(path) for path in suites(arguments.suite)]
    for name in engines:
        check_spelling(name)
    limit_s = seconds_of(arguments.within) if arguments.within is not None else math.inf
    # After all checks of spelling: a server started too early would outlive the error message.
    if not arguments.workers:  # workers have servers of their own
        draw_hash_seeds(seed)
        forkserver_context()  # it imports while this process does the same
    if not _any_is_usable(engines, arguments.deadline):
        return USAGE
    resolved = {"out": out, "expectations": file, "no_expectations": file is None}
    selected = [
        *("-q", "--tb=no"),  # our report shows every failure once, with its cause
        *pytest_arguments(vars(arguments) | resolved),
        *(["-n", str(arguments.workers)] if arguments.workers else []),
        # Else workers take neighbours together, which share a reference; here cases begin in the order of their power.
        *(["--maxschedchunk=1"] if arguments.workers and arguments.within is not None else []),
        *(["-k", arguments.keyword] if arguments.keyword else []),
        *extra,
    ]
    is_quiet = arguments.quiet or arguments.json
    progress = CaseProgress(lists_all=lists_all, is_quiet=is_quiet, limit_s=limit_s)
    try:
        with redirect_stdout(sys.stderr if is_quiet else sys.stdout):
            code = call_pytest([*paths, *selected], progress)
    except KeyboardInterrupt:  # raised after pytest's own handler was removed
        code, progress.is_interrupted = PYTEST_INTERRUPTED, True
    with uninterrupted():
        ended = code_of_run(out, code, lambda: show_run(out, arguments, render))
    if not progress.is_interrupted:
        return ended
    print(f"shardproof: interrupted; what was judged is kept in {out}", file=sys.stderr)
    return INTERRUPTED


def _any_is_usable(engines: Sequence[str], limit_s: float) -> bool:
    """Print which third-party engines cannot be judged, and why; built-in engines are checked in pytest."""
    from shardproof.harness.runner.engines import unavailable

    foreign = [name for name in engines if name not in BUILT_IN]
    problems = unavailable(foreign, limit_s=limit_s)
    for name, problem in problems.items():
        print(f"shardproof: engine {name!r}: {problem}", file=sys.stderr)
    return len(problems) < len(engines)
