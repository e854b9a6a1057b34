"""The command line: a thin layer over pytest for running, and over reports for showing."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof.engine.registry import BUILT_IN, EngineNotFoundError, check_spelling
from shardproof.harness.audit.marks import WORLDS, Breadth
from shardproof.harness.cases.case_id import node_of
from shardproof.harness.errors import ShardproofError, UsageError
from shardproof.harness.records.provenance import version_of
from shardproof.harness.records.record import Verdict
from shardproof.harness.runner.interruption import interruptible, uninterrupted
from shardproof.harness.runner.invoke import (
    CONFORMS,
    DOES_NOT_CONFORM,
    OUR_FAULT,
    USAGE,
    call_pytest,
    check_temporary_folder,
    suite_folders,
    suites,
)
from shardproof.harness.runner.launchers import refuse_launcher

if TYPE_CHECKING:
    from shardproof.harness.records.run import Run

_OWN_MODEL = "own_model"  # the suite
_DEFAULT_WORLD = "threads:2"
_LEAST_S = 60.0  # that a world, or an oracle, may take
_READING_S = 300.0  # that reading a model may take: nothing is known of it yet
_PASSES = 9  # of each rank: three steps of three microbatches
# An oracle trains some seven times for all ranks, in float64; a busy machine halves its speed, and halves it again.
_ALLOWANCE = 30.0
_INTERRUPTED = 2  # pytest.ExitCode.INTERRUPTED, without the import


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns 0 conforming, 1 not, 2 wrong usage, 3 an error of our own."""
    arguments = _parser().parse_args(argv)
    if arguments.command in {run, check, explore, mutants}:
        # A console script does not look for modules where it is called; people name engines of their own from there.
        # Last, so that no folder there hides one of ours. Commands that only read a run do not look there.
        sys.path.append(str(Path.cwd()))
    try:
        if arguments.command in {run, check, mutants}:
            refuse_launcher(os.environ)
        with interruptible():
            code: int = arguments.command(arguments)
    except KeyboardInterrupt:
        print("shardproof: interrupted", file=sys.stderr)
        return OUR_FAULT
    except (UsageError, EngineNotFoundError) as error:
        print(f"shardproof: {error}", file=sys.stderr)
        return USAGE
    except ShardproofError as error:
        print(f"shardproof: {error}", file=sys.stderr)
        return OUR_FAULT
    return code


def run(arguments: argparse.Namespace) -> int:
    """Judge engines on suites: launch worlds, record verdicts, write the reports."""
    from shardproof.harness.cli.parts import part_options

    return _run(arguments, f"--keep={arguments.keep}", *part_options(arguments))


def check(arguments: argparse.Namespace) -> int:
    """Judge engines on a model of your own: is it trained as one process trains it, under every plan that they declare?

    MODEL is a class with build(), batch() and loss(), as path/to/file.py:Name or package.module:Name.
    """
    from shardproof.harness.cli.progress import Progress
    from shardproof.harness.runner.user_models import absolute, known_model, pass_seconds
    from shardproof.harness.worlds.processes.forkserver import draw_hash_seeds, forkserver_context
    from shardproof.harness.worlds.spec import WorldSpec
    from shardproof.reports.model_check import render

    check_temporary_folder()
    spec = absolute(arguments.model)
    most_ranks = max(WorldSpec.parse(world).size for world in arguments.world or [_DEFAULT_WORLD])
    draw_hash_seeds(arguments.schedule_seed)  # before the server starts: one with other seeds is ended
    forkserver_context()  # it starts while this process goes on
    known_model(spec, arguments.deadline or _READING_S)
    if arguments.deadline is None:
        arguments.deadline = deadline_for(pass_seconds(spec), most_ranks)
    print(
        f"{arguments.model}: forward and backward take {pass_seconds(spec):.3g} s; a case that takes longer than "
        f"{arguments.deadline:.0f} s counts as hung"
    )
    # A case is a world and an oracle; both have deadlines of their own, and pytest's is for what has none.
    limit_s = 3 * arguments.deadline
    return _run(
        arguments, f"--model={spec}", "--tb=no", f"--timeout={limit_s}", render=render, plugin=Progress()
    )


def deadline_for(pass_s: float, num_ranks: int) -> float:
    """Return what a world, or an oracle, may take for a model of which forward and backward take so long."""
    return round(_LEAST_S + _ALLOWANCE * _PASSES * num_ranks * pass_s)


def _run(
    arguments: argparse.Namespace,
    *extra: str,
    render: Callable[[Run], str] | None = None,
    plugin: object | None = None,
) -> int:
    from shardproof.harness.records.provenance import today
    from shardproof.harness.records.run import refuse_existing
    from shardproof.harness.runner.options import RunOptions
    from shardproof.harness.verdicts import known_failures_file
    from shardproof.harness.worlds.processes.forkserver import draw_hash_seeds, forkserver_context
    from shardproof.harness.worlds.spec import WorldSpec

    out = Path(arguments.out or Path("conformance") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}")
    # Here rather than in pytest, whose own message would bury ours.
    refuse_existing(out)
    check_temporary_folder()
    file = None if arguments.no_expectations else known_failures_file.find(arguments.expectations)
    if file is not None:
        known_failures_file.read(file, today=today())
    for world in arguments.world or []:
        WorldSpec.parse(world)
    effort = RunOptions(
        seed=arguments.schedule_seed, num_schedules=arguments.schedules, is_thorough=arguments.thorough
    )
    worlds = arguments.world or [_DEFAULT_WORLD]
    nodes = [
        node_of(case, engine, world)
        for case, engine, world in product(arguments.case or (), arguments.engine or sorted(BUILT_IN), worlds)
    ]
    paths = nodes or [str(path) for path in suites(arguments.suite)]
    for name in arguments.engine or ():
        check_spelling(name)
    # After all that may be misspelt: a server that was started in vain would outlive the message.
    if not arguments.workers:  # which have servers of their own
        draw_hash_seeds(effort.seed)
        forkserver_context()  # it does its imports while this process does its own
    if not _any_is_usable(arguments.engine or sorted(BUILT_IN), arguments.deadline):
        return USAGE
    options = [
        *(f"--engine={name}" for name in arguments.engine or []),
        *(f"--world={world}" for world in arguments.world or []),
        f"--out={out}",
        f"--deadline={arguments.deadline}",
        f"--schedule-seed={effort.seed}",
        f"--schedules={effort.num_schedules}",
        *(["--thorough"] if effort.is_thorough else []),
        *([f"--expectations={file}"] if file else ["--no-expectations"]),
        *(["-n", str(arguments.workers)] if arguments.workers else []),
        *(["-k", arguments.keyword] if arguments.keyword else []),
        *extra,
    ]
    try:
        plugins = [plugin] if plugin else []
        code = call_pytest([*paths, *options], *plugins)
    except KeyboardInterrupt:  # one that pytest did not take, because it was about to end
        code = _INTERRUPTED
    with uninterrupted():
        return _conclude(out, code, render)


def _any_is_usable(engines: Sequence[str], limit_s: float) -> bool:
    """Print why an engine from outside cannot be judged, before anything runs; those built in are asked in pytest."""
    from shardproof.harness.runner.engines import examine

    foreign = [name for name in engines if name not in BUILT_IN]
    unavailable = examine(foreign, limit_s=limit_s).unavailable
    for name, problem in unavailable.items():
        print(f"shardproof: engine {name!r}: {problem}", file=sys.stderr)
    return len(unavailable) < len(engines)


def explore(arguments: argparse.Namespace) -> int:
    """Judge programs drawn from a space of traits, options and moves; shrink what fails, and write it down.

    Programs that failed before come first: those that ship and those in DIR/found.txt. Returns 1 for new failures.
    """
    from shardproof.harness.cli.explore import ExploreRequest, explore_programs, print_script

    if arguments.script is not None:
        return print_script(arguments.script, arguments.one_engine, arguments.one_world)
    check_temporary_folder()
    return explore_programs(
        ExploreRequest(
            engine=arguments.one_engine,
            world=arguments.one_world,
            out=Path(
                arguments.out or Path("conformance") / f"explore-{arguments.one_engine.replace('/', '-')}"
            ),
            seed=arguments.seed,
            minutes=arguments.minutes,
            num_programs=arguments.programs,
            deadline_s=arguments.deadline,
        )
    )


def judge(arguments: argparse.Namespace) -> int:
    """Judge again what a run observed, without a world or an engine; writes records and reports below DIR/judged.

    A record that cannot be judged again keeps its verdict and is listed; the exit code is then not 0.
    """
    from shardproof.harness.cli.judge import judge_again

    return _show(judge_again(Path(arguments.run)))


def report(arguments: argparse.Namespace) -> int:
    """Write the reports of a run again and print its matrix."""
    return _show(Path(arguments.run))


def timeline(arguments: argparse.Namespace) -> int:
    """Write what happened when in one case, the worst that matches, for Perfetto or chrome://tracing."""
    from shardproof.harness.cli.timeline import TimelineRequest, export

    return export(
        TimelineRequest(
            run=Path(arguments.run),
            case=arguments.case,
            engines=tuple(arguments.engine or ()),
            ranks=tuple(arguments.rank or ()),
            out=Path(arguments.out) if arguments.out else None,
        )
    )


def diff(arguments: argparse.Namespace) -> int:
    """Compare two runs: verdicts, headlines, counts and bytes that changed; returns 1 if any did, else 0."""
    from shardproof.harness.cli.diff import DiffRequest, Format, show_diff

    return show_diff(
        DiffRequest(
            before=Path(arguments.before),
            after=Path(arguments.after),
            format=Format(arguments.format),
            engines=tuple(arguments.engine or ()),
            out=Path(arguments.out) if arguments.out else None,
        )
    )


def merge(arguments: argparse.Namespace) -> int:
    """Merge runs that were made alike into one, and write its reports; returns what a run of all would return.

    A run that is damaged or was interrupted, or a shard that is missing, makes the merged run incomplete.
    """
    from shardproof.harness.cli.merge import merge_runs

    return _show(merge_runs([Path(folder) for folder in arguments.runs], Path(arguments.out)))


def expectations(arguments: argparse.Namespace) -> int:
    """Bring the file of known failures in line with a run: print the change, and with --update write it.

    Entries that passed or are stale are removed or narrowed. Failures that no entry excuses get new entries, which need
    --reason and --link; choose the failures of one cause with --engine and --case. Returns 1 if something remains.
    """
    from shardproof.harness.cli.expectations import UpdateRequest, update

    return update(
        UpdateRequest(
            run=Path(arguments.run),
            file=arguments.expectations,
            is_written=arguments.update,
            reason=arguments.reason,
            link=arguments.link,
            expiry=arguments.expiry,
            engines=tuple(arguments.engine or ()),
            case=arguments.case,
        )
    )


def list_all(arguments: argparse.Namespace) -> int:
    """List engines with what they declare, suites, and with --cases every case."""
    from shardproof.harness.cli.case_list import list_cases
    from shardproof.harness.cli.engine_list import engine_lines

    print("engines:", *engine_lines(), "suites:", sep="\n")
    for suite in suite_folders():
        print(f"  {suite.name:18} {_first_sentence(suite / '__init__.py')}")
    if not arguments.cases:
        return CONFORMS
    print("cases:")
    return list_cases()


def doctor(arguments: argparse.Namespace) -> int:
    """Return what this machine can run, by running it."""
    from shardproof.harness.cli.doctor import examine

    findings = examine()
    for finding in findings:
        print(f"{'ok  ' if finding.is_ok else 'FAIL'} {finding.what}: {finding.detail}")
    return CONFORMS if all(f.is_ok for f in findings) else OUR_FAULT


def coverage(arguments: argparse.Namespace) -> int:
    """Return which cases stand for each test of torch's own, and what runs say of them; 1 where one has no case.

    With --api the same of each name of an interface of torch's.
    """
    from shardproof.harness.cli.coverage import show_coverage

    folders = [Path(folder) for folder in arguments.runs]
    return show_coverage(folders, api=arguments.api, is_markdown=arguments.markdown)


def mutants(arguments: argparse.Namespace) -> int:
    """Run mutation testing: check that each case kills the mutants that its `kills` marks name; prints the kill matrix.

    Returns 1 where one of them survives, where a mutant is killed by no case, or where a case kills no mutant.
    """
    from shardproof.harness.cli.mutants import MutantsRequest, run_mutants, shipped

    now = f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    return run_mutants(
        MutantsRequest(
            targets=shipped(),
            suites=tuple(suites(arguments.suite)),
            worlds=tuple(dict.fromkeys(arguments.world or WORLDS)),
            breadth=arguments.breadth or Breadth.MARKED,
            out=Path(arguments.out or Path("conformance") / f"mutants-{now}"),
            keyword=arguments.keyword or "",
            num_workers=arguments.workers,
            deadline_s=arguments.deadline,
            is_whole=not (arguments.suite or arguments.keyword),
        )
    )


def _conclude(out: Path, pytest_code: int, render: Callable[[Run], str] | None = None) -> int:
    """Turn pytest's exit code into ours; where cases ran the records decide."""
    has_records = (out / "records.jsonl").exists()
    if pytest_code == 4:
        if has_records:  # some of the engines asked for could not be judged; the others were
            _show(out, render)
        return USAGE
    if pytest_code == 5:
        print("shardproof: no case was selected; see `shardproof list --cases`", file=sys.stderr)
        return USAGE
    if not has_records:
        print("shardproof: no case was run; see the messages above", file=sys.stderr)
        return OUR_FAULT
    code = _show(out, render)
    if pytest_code not in (0, 1):
        return OUR_FAULT
    return DOES_NOT_CONFORM if code == CONFORMS and pytest_code else code


def _show(run_folder: Path, render: Callable[[Run], str] | None = None) -> int:
    """Write a run's reports, print its matrix or what ``render`` makes of it, and return the exit code."""
    from shardproof.reports import terminal
    from shardproof.reports.summary import conforms
    from shardproof.reports.write import write_reports

    result, paths = write_reports(run_folder)
    print((render or terminal.render)(result))
    for path in paths:
        print(f"wrote {path}")
    if Verdict.ERRORED in {record.verdict for record in result.records}:
        return OUR_FAULT
    return CONFORMS if conforms(result) else DOES_NOT_CONFORM


def _first_sentence(module: Path) -> str:
    text = module.read_text().strip().strip('"')
    return text.split("\n", 1)[0]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardproof", description="Judge data-parallel training engines for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"shardproof {version_of('shardproof')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    sub = commands.add_parser("run", help="judge engines", description=run.__doc__)
    sub.add_argument(
        "--engine", action="append", metavar="NAME", help="repeat for several; default: all built in"
    )
    _add_selection(sub, worlds=_DEFAULT_WORLD)
    sub.add_argument("--case", action="append", metavar="ID", help="this case alone, by its id in records")
    _add_parts(sub)
    sub.add_argument(
        "--keep",
        choices=("failures", "all"),
        default="failures",
        help="observations to keep; default: failures",
    )
    _add_effort(sub)
    group = sub.add_mutually_exclusive_group()
    group.add_argument(
        "--expectations", metavar="FILE", help="known failures; default: suites/expectations.toml"
    )
    group.add_argument("--no-expectations", action="store_true", help="give raw verdicts")
    sub.set_defaults(command=run)
    _add_check(commands)
    _add_explore(commands)
    for command, text in (
        (judge, "judge the observations of a run again"),
        (report, "write a run's reports again"),
    ):
        sub = commands.add_parser(command.__name__, help=text, description=command.__doc__)
        sub.add_argument("run", metavar="DIR", help="folder of the run")
        sub.set_defaults(command=command)
    sub = commands.add_parser("merge", help="make one run of many", description=merge.__doc__)
    sub.add_argument("runs", metavar="DIR", nargs="+", help="folders of runs")
    sub.add_argument("--out", metavar="NEW", required=True, help="folder for the merged run")
    sub.set_defaults(command=merge)
    _add_expectations(commands)
    sub = commands.add_parser("timeline", help="export one case's timeline", description=timeline.__doc__)
    sub.add_argument("run", metavar="DIR", help="folder of the run")
    sub.add_argument("--case", default="", metavar="ID", help="the case, or a part of its name")
    sub.add_argument("--engine", action="append", metavar="NAME", help="repeat for several; default: any")
    sub.add_argument(
        "--rank", type=int, action="append", metavar="R", help="repeat for several; default: all"
    )
    sub.add_argument("--out", metavar="FILE", help="default: timeline.json in the run's folder")
    sub.set_defaults(command=timeline)
    sub = commands.add_parser("list", help="list engines and suites", description=list_all.__doc__)
    sub.add_argument("--cases", action="store_true", help="list every case too")
    sub.set_defaults(command=list_all)
    _add_diff(commands)
    _add_proofs(commands)
    sub = commands.add_parser("doctor", help="report what this machine can run", description=doctor.__doc__)
    sub.set_defaults(command=doctor)
    return parser


# Any, here and below: argparse does not export the type of its sub-parsers.
def _add_check(commands: Any) -> None:
    sub = commands.add_parser("check", help="judge engines on your own model", description=check.__doc__)
    sub.add_argument("model", metavar="MODEL", help="path/to/file.py:Name or package.module:Name")
    sub.add_argument(
        "--engine", action="append", metavar="NAME", help="repeat for several; default: all built in"
    )
    _add_cases(sub, worlds=_DEFAULT_WORLD, deadline_s=None)
    _add_effort(sub)
    # Raw verdicts: what is known of other models excuses nothing of this one.
    sub.set_defaults(command=check, suite=[_OWN_MODEL], case=None, expectations=None, no_expectations=True)


def _add_expectations(commands: Any) -> None:
    sub = commands.add_parser(
        "expectations", help="update the known failures from a run", description=expectations.__doc__
    )
    sub.add_argument("run", metavar="RUN", help="folder of a run")
    sub.add_argument("--update", action="store_true", help="write the file; otherwise the change is printed")
    sub.add_argument("--expectations", metavar="FILE", help="default: the file that the run was made with")
    for option, text in (
        ("reason", "one sentence on the new failures"),
        ("link", "address of their public report"),
        ("expiry", "last day of new entries; default: in 90 days"),
    ):
        sub.add_argument(f"--{option}", default="", metavar=option.upper(), help=text)
    sub.add_argument(
        "--engine", action="append", metavar="NAME", help="new entries for these engines only; may repeat"
    )
    sub.add_argument("--case", default="*", metavar="GLOB", help="new entries for these cases only")
    sub.set_defaults(command=expectations)


def _add_explore(commands: Any) -> None:
    sub = commands.add_parser("explore", help="judge programs drawn by seed", description=explore.__doc__)
    sub.add_argument("--engine", dest="one_engine", required=True, metavar="NAME")
    sub.add_argument(
        "--world", dest="one_world", default="threads:2", metavar="KIND:SIZE", help="default: threads:2"
    )
    sub.add_argument("--minutes", type=float, default=5.0, metavar="M", help="default: 5")
    sub.add_argument("--programs", type=int, metavar="N", help="stop after N programs")
    sub.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the draws; default: 0")
    sub.add_argument("--out", metavar="DIR", help="findings; default: conformance/explore-NAME")
    sub.add_argument("--deadline", type=float, default=60.0, metavar="S", help="seconds a world may take")
    sub.add_argument(
        "--script", metavar="PROGRAM", help="print this program as a script for torchrun; judge none"
    )
    sub.set_defaults(command=explore)


def _add_diff(commands: Any) -> None:
    sub = commands.add_parser("diff", help="compare two runs", description=diff.__doc__)
    sub.add_argument("before", metavar="A", help="folder of a run")
    sub.add_argument("after", metavar="B", help="folder of the run to compare it with")
    sub.add_argument("--engine", action="append", metavar="NAME", help="repeat for several; default: all")
    sub.add_argument(
        "--format",
        choices=("terminal", "markdown", "json"),
        default="terminal",
        help="default: terminal; markdown fits a comment on a pull request, json has every change",
    )
    sub.add_argument("--out", metavar="FILE", help="write it there instead of printing it")
    sub.set_defaults(command=diff)


def _add_proofs(commands: Any) -> None:
    """Add the commands that say what the suites themselves are worth."""
    sub = commands.add_parser(
        "coverage", help="show which of torch's own tests the cases cover", description=coverage.__doc__
    )
    sub.add_argument("runs", metavar="DIR", nargs="*", help="folders of runs, whose verdicts are shown")
    sub.add_argument("--api", metavar="NAME", help="lines of this interface instead of tests: fsdp1")
    sub.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    sub.set_defaults(command=coverage)
    sub = commands.add_parser(
        "mutants", help="run mutation testing of the suites", description=mutants.__doc__
    )
    _add_selection(sub, worlds="threads:2, 4, 3, 6 and 1, processes:2, each case in the first that suits it")
    breadth = sub.add_mutually_exclusive_group()
    breadth.add_argument(
        "--full",
        dest="breadth",
        action="store_const",
        const=Breadth.ALL,
        help="every mutant on every case, not only on those that name it",
    )
    breadth.add_argument(
        "--quick",
        dest="breadth",
        action="store_const",
        const=Breadth.ONCE,
        help="every mutant on one case, the first that names it",
    )
    sub.set_defaults(command=mutants)


def _add_effort(sub: argparse.ArgumentParser) -> None:
    """Add what says how hard to look."""
    sub.add_argument(
        "--schedule-seed",
        type=int,
        default=0,
        metavar="S",
        help="seed of schedules and hashes; default: 0",
    )
    sub.add_argument(
        "--schedules",
        type=int,
        default=1,
        metavar="N",
        help="run each case under N schedules, where ranks are threads",
    )
    sub.add_argument(
        "--thorough",
        action="store_true",
        help="watch for all that can be watched on a CPU; about 3 x the time",
    )


def _add_parts(sub: argparse.ArgumentParser) -> None:
    """Add what runs a part of the selected cases."""
    sub.add_argument("--shard", metavar="N/OF", help="run one of several parts of the cases, such as 2/8")
    sub.add_argument(
        "--durations", metavar="DIR", help="balance shards by the durations of this run; default: by number"
    )
    group = sub.add_mutually_exclusive_group()
    group.add_argument(
        "--resume", metavar="DIR", help="the rest of an interrupted run; needs that run's options"
    )
    group.add_argument(
        "--last-failed",
        metavar="DIR",
        nargs="?",
        const="",
        help="only what did not conform in this run; default: the newest below conformance/",
    )


def _add_selection(sub: argparse.ArgumentParser, *, worlds: str) -> None:
    """Add which cases run where; ``worlds`` are the default ones in words."""
    sub.add_argument("--suite", action="append", metavar="NAME", help="repeat for several; default: all")
    _add_cases(sub, worlds=worlds)


def _add_cases(sub: argparse.ArgumentParser, *, worlds: str, deadline_s: float | None = 60.0) -> None:
    """Add what commands that run cases share."""
    sub.add_argument(
        "--world", action="append", metavar="KIND:SIZE", help=f"repeat for several; default: {worlds}"
    )
    sub.add_argument("--out", metavar="DIR", help="folder for the run; default: below conformance/")
    default = "grows with the model" if deadline_s is None else f"{deadline_s:.0f}"
    sub.add_argument(
        "--deadline",
        type=float,
        default=deadline_s,
        metavar="S",
        help=f"seconds a world may take; default: {default}",
    )
    sub.add_argument("-n", "--workers", type=int, default=0, metavar="N", help="run N cases at a time")
    sub.add_argument("-k", "--keyword", metavar="EXPR", help="only cases that match, as in pytest")


if __name__ == "__main__":
    sys.exit(main())
