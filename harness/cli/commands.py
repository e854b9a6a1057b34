"""The commands, each a function of its parsed arguments that returns an exit code.

Imports are where they are used: `--help` and the commands that only read a run need no torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from shardproof.engine.names import absolute
from shardproof.engine.registry import BUILT_IN, check_spelling
from shardproof.harness.audit.marks import WORLDS, Breadth
from shardproof.harness.cases.case_id import node_of
from shardproof.harness.cli.exit_codes import (
    CONFORMS,
    DOES_NOT_CONFORM,
    INTERRUPTED,
    NOTHING_JUDGED,
    OUR_FAULT,
    PYTEST_INTERRUPTED,
    USAGE,
    code_of_run,
)
from shardproof.harness.errors import UsageError
from shardproof.harness.records.record import Verdict
from shardproof.harness.runner.interruption import uninterrupted
from shardproof.harness.runner.invoke import call_pytest, check_temporary_folder, suite_folders, suites
from shardproof.harness.runner.launchers import is_launched
from shardproof.harness.runner.options import DEFAULT_WORLD, RunOptions, pytest_arguments
from shardproof.harness.worlds.launched.launcher import launched_process

if TYPE_CHECKING:
    from shardproof.harness.records.run import Run

    # Receives a run, its folder and the reports written there.
    _Printer = Callable[[Run, Path, Sequence[Path]], None]

_LEAST_S = 60.0  # the shortest deadline of a world or an oracle
_READING_S = 300.0  # the deadline for importing and building a model, before its speed is known
_PASSES = 9  # forward and backward passes of each rank: three steps of three microbatches
# An oracle trains about seven times for all ranks, in float64; a busy machine can be four times slower.
_ALLOWANCE = 30.0


def run(arguments: argparse.Namespace) -> int:
    """Judge engines on suites: launch worlds, record verdicts, write the reports."""
    from shardproof.harness.cli.parts import resolve_parts, take_up

    resolve_parts(arguments)
    if is_launched(arguments.world):
        done = take_up(arguments, launched_process(os.environ))
        if done is not None:
            return _show(done, _printer(arguments))
    return _run(arguments)


def check(arguments: argparse.Namespace) -> int:
    """Judge engines on a model of your own: is it trained as one process trains it, under every plan that they declare?

    MODEL is a class, as path/to/file.py:Name or package.module:Name. It defines build(), which returns a new model;
    batch(generator), which returns one rank's microbatch: a mapping of keyword arguments, a tuple of arguments, or the
    only argument of forward; and loss(output, batch), the mean loss over it. Optional are units, patterns for the
    submodules that communicate together; optimizer(params); scheduler(optimizer); and float64, whether the reference
    computes in it.
    """
    from shardproof.harness.cli.wrapped_engines import wrapped_engines
    from shardproof.harness.runner.user_model.model_summary import model_summary
    from shardproof.harness.runner.user_model.read import known_model, pass_seconds
    from shardproof.harness.worlds.processes.forkserver import draw_hash_seeds, forkserver_context
    from shardproof.harness.worlds.spec import WorldSpec
    from shardproof.reports.user_model_result import render

    check_temporary_folder()
    arguments.engine = wrapped_engines(arguments.engine, vars(arguments)["with"], arguments.wrap)
    _refuse_mistakes(arguments)
    spec = absolute(arguments.model)
    most_ranks = max(WorldSpec.parse(world).size for world in arguments.world or [DEFAULT_WORLD])
    draw_hash_seeds(
        arguments.schedule_seed
    )  # before the server starts: a server with other seeds would be ended
    forkserver_context()  # it starts while this process continues
    model, optimizer = known_model(spec, max(arguments.deadline or 0.0, _READING_S))
    if model.facts.is_compiled:
        _refuse_threads(
            arguments,
            "inductor compiles it and threads do not compile at the same time",
            instead="backend='aot_eager'",
        )
    if model.facts.sparse:
        _refuse_threads(
            arguments, "it has sparse gradients and threads exchange dense tensors", instead="sparse=False"
        )
    if arguments.deadline is None:
        arguments.deadline = deadline_for(pass_seconds(spec), most_ranks)
    found = model_summary(model, optimizer, pass_s=pass_seconds(spec), limit_s=arguments.deadline)
    _announce(arguments, f"{arguments.model}\n{found}\n")
    # A case is a world and an oracle, each with a deadline; pytest's timeout is for code without one.
    limit_s = 3 * max(arguments.deadline, _LEAST_S)
    return _run(arguments, f"--model={spec}", f"--timeout={limit_s}", render=render, lists_all=True)


def _refuse_mistakes(arguments: argparse.Namespace) -> None:
    """Raise UsageError for what needs no study of the model: a folder that is taken, and misspelt names."""
    from shardproof.harness.cases.case_id import refuse_unknown_words
    from shardproof.harness.records.run import refuse_existing
    from shardproof.harness.runner.engines import describe

    if arguments.out:
        refuse_existing(Path(arguments.out))
    engines = arguments.engine or sorted(BUILT_IN)
    for name in engines:
        check_spelling(name)
    names = (*engines, *(arguments.world or [DEFAULT_WORLD]), arguments.model.rpartition(":")[2])
    for suite in suites(arguments.suite) if arguments.keyword else ():
        refuse_unknown_words(arguments.keyword, suite, names)
    for name in arguments.engine or ():
        if name not in BUILT_IN:
            describe(name)


def _refuse_threads(arguments: argparse.Namespace, because: str, *, instead: str) -> None:
    """Raise UsageError if ranks of some world are threads."""
    threads = [w for w in arguments.world or [DEFAULT_WORLD] if w.startswith("threads")]
    if threads:
        raise UsageError(
            f"model {arguments.model}",
            expected=f"worlds of processes, because {because}",
            got=", ".join(threads),
            hint=f"--world {threads[0].replace('threads', 'processes')}, or {instead}",
        )


def deadline_for(pass_s: float, num_ranks: int) -> float:
    """Return the deadline of a world or an oracle [s]; ``pass_s`` is the time of one forward and backward."""
    return round(_LEAST_S + _ALLOWANCE * _PASSES * num_ranks * pass_s)


def _run(
    arguments: argparse.Namespace,
    *extra: str,
    render: Callable[[Run], str] | None = None,
    lists_all: bool = False,
) -> int:
    from shardproof.harness.cli.progress import CaseProgress
    from shardproof.harness.records.provenance import today
    from shardproof.harness.records.run import refuse_existing
    from shardproof.harness.verdicts import known_failures_file
    from shardproof.harness.worlds.processes.forkserver import draw_hash_seeds, forkserver_context
    from shardproof.harness.worlds.spec import WorldSpec

    out = Path(arguments.out or Path("conformance") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}")
    # Here rather than in pytest, because its own message would hide ours.
    refuse_existing(out)
    check_temporary_folder()
    file = None if arguments.no_expectations else known_failures_file.find(arguments.expectations)
    if file is not None:
        known_failures_file.read(file, today=today())
    arguments.world = [str(WorldSpec.parse(world)) for world in arguments.world or []]
    effort = _effort(arguments)
    worlds = arguments.world or [DEFAULT_WORLD]
    nodes = [
        node_of(case, engine, world)
        for case, engine, world in product(arguments.case or (), arguments.engine or sorted(BUILT_IN), worlds)
    ]
    paths = nodes or [str(path) for path in suites(arguments.suite)]
    for name in arguments.engine or ():
        check_spelling(name)
    # After all checks of spelling: a server started too early would outlive the error message.
    if not arguments.workers:  # workers have servers of their own
        draw_hash_seeds(effort.seed)
        forkserver_context()  # it imports while this process does the same
    if not _any_is_usable(arguments.engine or sorted(BUILT_IN), arguments.deadline):
        return USAGE
    resolved = {"out": out, "expectations": file, "no_expectations": file is None}
    options = [
        *("-q", "--tb=no"),  # our report shows every failure once, with its cause
        *pytest_arguments(vars(arguments) | resolved),
        *(["-n", str(arguments.workers)] if arguments.workers else []),
        *(["-k", arguments.keyword] if arguments.keyword else []),
        *extra,
    ]
    is_quiet = arguments.quiet or arguments.json
    progress = CaseProgress(lists_all=lists_all, is_quiet=is_quiet)
    try:
        with redirect_stdout(sys.stderr if is_quiet else sys.stdout):
            code = call_pytest([*paths, *options], progress)
    except KeyboardInterrupt:  # raised after pytest's own handler was removed
        code, progress.is_interrupted = PYTEST_INTERRUPTED, True
    with uninterrupted():
        ended = code_of_run(out, code, lambda: _show(out, _printer(arguments, render)))
    if not progress.is_interrupted:
        return ended
    print(f"shardproof: interrupted; what was judged is kept in {out}", file=sys.stderr)
    return INTERRUPTED


def _effort(arguments: argparse.Namespace) -> RunOptions:
    return RunOptions(
        seed=arguments.schedule_seed, num_schedules=arguments.schedules, is_thorough=arguments.thorough
    )


def _any_is_usable(engines: Sequence[str], limit_s: float) -> bool:
    """Print which third-party engines cannot be judged, and why; built-in engines are checked in pytest."""
    from shardproof.harness.runner.engines import examine

    foreign = [name for name in engines if name not in BUILT_IN]
    unavailable = examine(foreign, limit_s=limit_s).unavailable
    for name, problem in unavailable.items():
        print(f"shardproof: engine {name!r}: {problem}", file=sys.stderr)
    return len(unavailable) < len(engines)


def explore(arguments: argparse.Namespace) -> int:
    """Judge programs drawn from a space of traits, options and moves; shrink failures, and save them.

    Programs that failed before come first: the bundled ones and those in DIR/found.txt. Returns 1 for new failures.
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
            effort=_effort(arguments),
        )
    )


def judge(arguments: argparse.Namespace) -> int:
    """Judge again what a run observed, without a world or an engine; writes records and reports below DIR/judged.

    A record that cannot be judged again keeps its verdict and is listed; the exit code is then not 0.
    """
    from shardproof.harness.cli.judge import judge_again

    return _show(judge_again(Path(arguments.run)), _printer(arguments))


def report(arguments: argparse.Namespace) -> int:
    """Write the reports of a run again and print its matrix."""
    return _show(Path(arguments.run), _printer(arguments))


def timeline(arguments: argparse.Namespace) -> int:
    """Write the timeline of one case, the worst that matches, for Perfetto or chrome://tracing."""
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
    """Merge runs with equal settings into one, and write its reports; returns the exit code of a single run of all.

    A run that is damaged or was interrupted, or a missing shard, makes the merged run incomplete.
    """
    from shardproof.harness.cli.merge import merge_runs

    return _show(
        merge_runs([Path(folder) for folder in arguments.runs], Path(arguments.out)), _printer(arguments)
    )


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
    """List engines with their capabilities, suites, and with --cases every case."""
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
    """Report what this machine can run, by running it."""
    from shardproof.harness.cli.doctor import examine

    findings = examine()
    for finding in findings:
        print(f"{'ok  ' if finding.is_ok else 'FAIL'} {finding.what}: {finding.detail}")
    return CONFORMS if all(f.is_ok for f in findings) else OUR_FAULT


def coverage(arguments: argparse.Namespace) -> int:
    """Show which cases cover each of torch's own tests, with their verdicts; returns 1 if a test has no case.

    With --api the same for each name of one of torch's interfaces.
    """
    from shardproof.harness.cli.coverage import show_coverage

    folders = [Path(folder) for folder in arguments.runs]
    return show_coverage(folders, api=arguments.api, is_markdown=arguments.markdown)


def mutants(arguments: argparse.Namespace) -> int:
    """Run mutation testing: check that each case kills the mutants that its `kills` marks name; prints the kill matrix.

    Returns 1 if one of them survives, if no case kills a mutant, or if a case kills no mutant.
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


def _announce(arguments: argparse.Namespace, text: str) -> None:
    if not (arguments.quiet or arguments.json):
        print(text)


def _printer(arguments: argparse.Namespace, render: Callable[[Run], str] | None = None) -> _Printer:
    """Return the function that prints a run in the selected format; ``render`` replaces the usual report."""
    from shardproof.harness.cli.screen import show, width
    from shardproof.reports import summary_json, terminal

    def print_report(run: Run, folder: Path, paths: Sequence[Path]) -> None:
        show(render(run) if render else terminal.render(run, width=width()))
        print(*(f"wrote {path}" for path in paths), sep="\n")

    def print_causes(run: Run, folder: Path, paths: Sequence[Path]) -> None:
        show(terminal.render_causes(run, width=width()))

    def print_json(run: Run, folder: Path, paths: Sequence[Path]) -> None:
        print(summary_json.render(run, folder, paths))

    if arguments.json:
        return print_json
    return print_causes if arguments.quiet else print_report


def _show(run_folder: Path, printer: _Printer) -> int:
    """Write a run's reports, print it, and return the exit code."""
    from shardproof.harness.records.proof import unjudged
    from shardproof.reports.summary import Conclusion, conclude, conforms
    from shardproof.reports.write import write_reports

    result, paths = write_reports(run_folder)
    printer(result, run_folder, paths)
    if Verdict.ERRORED in {record.verdict for record in result.records}:
        return OUR_FAULT
    if conclude(result) is Conclusion.EMPTY:
        print(
            *(f"shardproof: {sentence}" for sentence in unjudged(result.records)), sep="\n", file=sys.stderr
        )
        return NOTHING_JUDGED
    return CONFORMS if conforms(result) else DOES_NOT_CONFORM


def _first_sentence(module: Path) -> str:
    text = module.read_text().strip().strip('"')
    return text.split("\n", 1)[0]
