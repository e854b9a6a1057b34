"""The parser of the command line. Options of runs are declared in runner/options.py, for pytest too."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from shardproof.harness.audit.marks import Breadth
from shardproof.harness.cli import commands
from shardproof.harness.records.provenance import version_of
from shardproof.harness.runner import options

_BELOW_CONFORMANCE = "below conformance/"


def parser() -> argparse.ArgumentParser:
    """Make the parser; it sets ``command`` to the function in `commands`."""
    made = argparse.ArgumentParser(
        prog="shardproof", description="Judge data-parallel training engines for PyTorch."
    )
    made.add_argument("--version", action="version", version=f"shardproof {version_of('shardproof')}")
    subparsers = made.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_judging, _add_reading, _add_lists, _add_proofs):
        add(subparsers)
    return made


# Any, here and below: argparse does not export the type of its subparsers.
def _add_judging(subparsers: Any) -> None:
    sub = _added(subparsers, "run", commands.run, "judge engines")
    options.ENGINE.add_to(sub.add_argument)
    _add_suites(sub)
    _add_cases(sub)
    sub.add_argument(
        "--case",
        action="append",
        metavar="ID",
        help="only this case, by its id in records; repeat for several",
    )
    for option in options.SHARDS:
        option.add_to(sub.add_argument)
    resume, last_failed = options.REMAINDERS
    group = sub.add_mutually_exclusive_group()
    resume.add_to(group.add_argument)
    last_failed.add_to(group.add_argument, nargs="?", const="", default_text="the newest below conformance/")
    options.KEEP.add_to(sub.add_argument)
    options.ORACLES.add_to(sub.add_argument)
    _add_effort(sub)
    _add_printed(sub)
    group = sub.add_mutually_exclusive_group()
    for option in options.KNOWN_FAILURES:
        option.add_to(group.add_argument)

    sub = _added(subparsers, "check", commands.check, "judge engines on your own model")
    sub.add_argument("model", metavar="MODEL", help="path/to/file.py:Name or package.module:Name")
    options.ENGINE.add_to(sub.add_argument)
    for option in options.WRAPPING:
        option.add_to(sub.add_argument)
    _add_cases(sub, deadline_s=None, deadline="grows with the model")
    options.ORACLES.add_to(sub.add_argument)
    _add_effort(sub)
    _add_printed(sub)
    # Raw verdicts: known failures of other models do not apply to this one.
    sub.set_defaults(suite=["user_model"], case=None, expectations=None, no_expectations=True)

    sub = _added(subparsers, "explore", commands.explore, "judge programs drawn by seed")
    sub.add_argument("--engine", dest="one_engine", required=True, metavar="NAME")
    sub.add_argument(
        "--world",
        dest="one_world",
        default=options.DEFAULT_WORLD,
        metavar="KIND:SIZE",
        help=f"default: {options.DEFAULT_WORLD}",
    )
    sub.add_argument("--minutes", type=float, default=5.0, metavar="M", help="default: 5")
    sub.add_argument("--programs", type=int, metavar="N", help="stop after N programs")
    sub.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the draws; default: 0")
    options.OUT.add_to(sub.add_argument, default_text="conformance/explore-NAME")
    for option in (options.DEADLINE, *options.EFFORT):
        option.add_to(sub.add_argument)
    sub.add_argument(
        "--script", metavar="PROGRAM", help="print this program as a script for torchrun; judge none"
    )


def _add_reading(subparsers: Any) -> None:
    """Add the commands that read runs."""
    for name, command, text in (
        ("judge", commands.judge, "judge the observations of a run again"),
        ("report", commands.report, "write a run's reports again"),
    ):
        sub = _added(subparsers, name, command, text)
        sub.add_argument("run", metavar="DIR", help="folder of the run")
        _add_printed(sub)

    sub = _added(subparsers, "merge", commands.merge, "make one run of many")
    sub.add_argument("runs", metavar="DIR", nargs="+", help="folders of runs")
    sub.add_argument("--out", metavar="NEW", required=True, help="folder for the merged run")
    _add_printed(sub)

    sub = _added(subparsers, "expectations", commands.expectations, "update the known failures from a run")
    sub.add_argument("run", metavar="RUN", help="folder of a run")
    sub.add_argument("--update", action="store_true", help="write the file; otherwise the change is printed")
    sub.add_argument("--expectations", metavar="FILE", help="default: the file that the run was made with")
    for option, text in (
        ("reason", "one sentence on the new failures"),
        ("link", "address of their public report"),
        ("expiry", "last day of new entries; default: in 90 days"),
    ):
        sub.add_argument(f"--{option}", default="", metavar=option.upper(), help=text)
    _add_engine_filter(sub, "new entries for these engines only, repeat for several")
    sub.add_argument("--case", default="*", metavar="GLOB", help="new entries for these cases only")

    sub = _added(subparsers, "timeline", commands.timeline, "export one case's timeline")
    sub.add_argument("run", metavar="DIR", help="folder of the run")
    sub.add_argument("--case", default="", metavar="ID", help="the case, or a part of its name")
    _add_engine_filter(sub, "repeat for several; default: any")
    sub.add_argument(
        "--rank", type=int, action="append", metavar="R", help="repeat for several; default: all"
    )
    sub.add_argument("--out", metavar="FILE", help="default: timeline.json in the run's folder")

    sub = _added(subparsers, "diff", commands.diff, "compare two runs")
    sub.add_argument("before", metavar="A", help="folder of a run")
    sub.add_argument("after", metavar="B", help="folder of the run to compare it with")
    _add_engine_filter(sub, "repeat for several; default: all")
    sub.add_argument(
        "--format",
        choices=("terminal", "markdown", "json"),
        default="terminal",
        help="default: terminal; markdown fits a comment on a pull request, json has every change",
    )
    sub.add_argument("--out", metavar="FILE", help="write it there instead of printing it")


def _add_lists(subparsers: Any) -> None:
    """Add the commands that list engines and suites, and that examine this machine."""
    sub = _added(subparsers, "list", commands.list_all, "list engines and suites")
    sub.add_argument("--cases", action="store_true", help="list every case too")
    _added(subparsers, "doctor", commands.doctor, "report what this machine can run")


def _add_proofs(subparsers: Any) -> None:
    """Add the commands that assess the suites themselves."""
    sub = _added(subparsers, "coverage", commands.coverage, "show which of torch's own tests the cases cover")
    sub.add_argument("runs", metavar="DIR", nargs="*", help="folders of runs, whose verdicts are shown")
    sub.add_argument("--api", metavar="NAME", help="lines of this interface instead of tests: fsdp1")
    sub.add_argument("--markdown", action="store_true", help="print the table as Markdown")

    sub = _added(subparsers, "mutants", commands.mutants, "run mutation testing of the suites")
    _add_suites(sub)
    _add_cases(sub, worlds="threads:2, 4, 3, 6 and 1, processes:2, each case in the first that suits it")
    breadth = sub.add_mutually_exclusive_group()
    for flag, chosen, text in (
        ("--full", Breadth.ALL, "every mutant on every case, not only on those that name it"),
        ("--quick", Breadth.ONCE, "every mutant on one case, the first that names it"),
    ):
        breadth.add_argument(flag, dest="breadth", action="store_const", const=chosen, help=text)


def _added(
    subparsers: Any, name: str, command: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    sub: argparse.ArgumentParser = subparsers.add_parser(name, help=text, description=command.__doc__)
    sub.set_defaults(command=command)
    return sub


def _add_engine_filter(sub: argparse.ArgumentParser, text: str) -> None:
    sub.add_argument("--engine", action="append", metavar="NAME", help=text)


def _add_suites(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--suite", action="append", metavar="NAME", help="repeat for several; default: all")


def _add_cases(
    sub: argparse.ArgumentParser,
    *,
    worlds: str = f"{options.DEFAULT_WORLD}, or launched under a launcher of several ranks",
    deadline_s: float | None = options.DEADLINE_S,
    deadline: str = "",
) -> None:
    """Add the options that commands that run cases share; ``worlds`` and ``deadline`` replace the defaults' text."""
    options.WORLD.add_to(sub.add_argument, default_text=worlds)
    options.OUT.add_to(sub.add_argument, default_text=_BELOW_CONFORMANCE)
    options.DEADLINE.add_to(sub.add_argument, default=deadline_s, default_text=deadline)
    sub.add_argument("-n", "--workers", type=int, default=0, metavar="N", help="run N cases at a time")
    sub.add_argument("-k", "--keyword", metavar="EXPR", help="only cases that match, as in pytest")


def _add_printed(sub: argparse.ArgumentParser) -> None:
    group = sub.add_mutually_exclusive_group()
    for option in options.PRINTED:
        option.add_to(group.add_argument)


def _add_effort(sub: argparse.ArgumentParser) -> None:
    for option in options.EFFORT:
        option.add_to(sub.add_argument)
