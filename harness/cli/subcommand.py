"""One command as a value, and the arguments that several commands share. Each file of `commands/` defines one.

`--help` and the commands that only read a run need no torch: the files of commands import what is heavy where they use
it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from shardproof.harness.runner import options
from shardproof.harness.runner.options import RunOptions

RUNS = Path("conformance")  # the folder of runs without --out, in the current one


@dataclass(frozen=True, slots=True, kw_only=True)
class Subcommand:
    """A command; its file has its name, and the docstring of ``run`` is its description.

    ``run`` returns an exit code, see `exit_codes`. ``place`` orders the list of all commands. ``imports_users_code``:
    engines and models in the current folder are found. ``joins_launcher``: under a launcher, other processes serve the
    ranks of the first one. ``fills_launcher``: without --world, it also judges in the launcher's world.
    """

    help: str
    place: int
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    imports_users_code: bool = False
    joins_launcher: bool = False
    fills_launcher: bool = False


def add_suites(parser: argparse.ArgumentParser) -> None:
    """Add the option that selects suites."""
    parser.add_argument("--suite", action="append", metavar="NAME", help="repeat for several; default: all")


def add_cases(
    parser: argparse.ArgumentParser,
    *,
    worlds: str = f"{options.DEFAULT_WORLD}, or launched under a launcher of several ranks",
    deadline_s: float | None = options.DEADLINE_S,
    deadline: str = "",
) -> None:
    """Add the options that commands that run cases share; ``worlds`` and ``deadline`` replace the defaults' text."""
    options.WORLD.add_to(parser.add_argument, default_text=worlds)
    options.OUT.add_to(parser.add_argument, default_text=f"below {RUNS}/")
    options.DEADLINE.add_to(parser.add_argument, default=deadline_s, default_text=deadline)
    parser.add_argument("-n", "--workers", type=int, default=0, metavar="N", help="run N cases at a time")
    parser.add_argument("-k", "--keyword", metavar="EXPR", help="only cases that match, as in pytest")


def add_effort(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how thoroughly each case is judged."""
    for option in options.EFFORT:
        option.add_to(parser.add_argument)


def effort_of(arguments: argparse.Namespace) -> RunOptions:
    """Return the values of these options."""
    return RunOptions(
        seed=arguments.schedule_seed,
        num_schedules=arguments.schedules,
        is_thorough=arguments.thorough,
        locates=not arguments.no_locate,
    )


def add_printed(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a run is printed."""
    group = parser.add_mutually_exclusive_group()
    for option in options.PRINTED:
        option.add_to(group.add_argument)


def add_engine_filter(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the option that selects the engines of a run that was made."""
    parser.add_argument("--engine", action="append", metavar="NAME", help=text)


def new_folder(kind: str = "") -> Path:
    """Name the folder of a run without --out by the time."""
    return RUNS / f"{kind}{datetime.now(UTC):%Y%m%d-%H%M%S}"
