"""The command ``shardproof check``: read a user's model, then judge engines on it by the suite `user_model`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from shardproof.engine.names import absolute, parse, spelled
from shardproof.engine.registry import BUILT_IN, check_spelling
from shardproof.harness.cases.case_id import refuse_unknown_words
from shardproof.harness.cli.commands.init import write_start
from shardproof.harness.cli.judged_cases import judge_cases
from shardproof.harness.cli.screen import width
from shardproof.harness.cli.subcommand import Subcommand, add_cases, add_effort, add_printed
from shardproof.harness.errors import ModuleGivenError, UsageError
from shardproof.harness.records.run import refuse_existing
from shardproof.harness.runner import options
from shardproof.harness.runner.invoke import check_temporary_folder, suites
from shardproof.harness.worlds.spec import WorldSpec

_WIDEST = 100  # columns: longer lines of prose are hard to read
_LEAST_S = 60.0  # the shortest deadline of a world or an oracle
_READING_S = 300.0  # the deadline for importing and building a model, before its speed is known
_PASSES = 9  # forward and backward passes of each rank: three steps of three microbatches
# An oracle trains about seven times for all ranks, in float64; a busy machine can be four times slower.
_ALLOWANCE = 30.0
_ROUNDING = 3  # a case of a Longformer took the time of 570 passes, beside the 540 of the allowance


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    named = parser.add_mutually_exclusive_group(required=True)
    named.add_argument(
        "model", nargs="?", metavar="MODEL", help="path/to/file.py:Name or package.module:Name"
    )
    named.add_argument(
        "--hf", metavar="CONFIG", help="as `shardproof init` writes it, such as LlamaConfig; writes the file"
    )
    options.ENGINE.add_to(parser.add_argument)
    for option in options.WRAPPING:
        option.add_to(parser.add_argument)
    add_cases(parser, deadline_s=None, deadline="grows with the model")
    options.WITHIN.add_to(parser.add_argument)
    options.ORACLES.add_to(parser.add_argument)
    parser.add_argument(
        "--expectations",
        metavar="FILE",
        help="failures of this model that are known, which then do not count (default: none)",
    )
    add_effort(parser)
    add_printed(parser)
    parser.set_defaults(suite=["user_model"], case=None)


def _run(arguments: argparse.Namespace) -> int:
    """Judge engines on a model of your own: is it trained as one process trains it, under every plan that they declare?

    MODEL is a class, as path/to/file.py:Name or package.module:Name. It defines build(), which returns a new model;
    batch(generator), which returns one rank's microbatch: a mapping of keyword arguments, a tuple of arguments, or the
    only argument of forward; and loss(output, batch), the mean loss over it. Optional are units, patterns for the
    submodules that communicate together; optimizer(params); scheduler(optimizer); and float64, whether the reference
    computes in it; step(model, batch, *optimizers) in place of loss, and optimizers(model) in place of optimizer. For a
    class of torch.nn.Module, the command writes the file that defines these, as `shardproof init` does.
    """
    from shardproof.harness.runner.user_model.model_summary import model_summary
    from shardproof.harness.runner.user_model.read import known_model, pass_seconds
    from shardproof.harness.worlds.processes.forkserver import draw_hash_seeds, forkserver_context
    from shardproof.reports.user_model_result import render

    check_temporary_folder()
    # The failures that are known of shipped cases are not those of this model.
    arguments.no_expectations = arguments.expectations is None
    arguments.engine = wrapped_engines(arguments.engine, vars(arguments)["with"], arguments.wrap)
    if arguments.hf:
        arguments.model = _started(None, arguments.hf)
    _refuse_mistakes(arguments)
    spec = absolute(arguments.model)
    sizes = [WorldSpec.parse(world).size for world in _worlds(arguments)]
    draw_hash_seeds(
        arguments.schedule_seed
    )  # before the server starts: a server with other seeds would be ended
    forkserver_context()  # it starts while this process continues
    reading_s = max(arguments.deadline or 0.0, _READING_S)
    try:
        model, optimizer = known_model(spec, reading_s, min(sizes))
    except ModuleGivenError:
        arguments.model = _started(arguments.model, None)
        spec = absolute(arguments.model)
        model, optimizer = known_model(spec, reading_s, min(sizes))
    if model.facts.unthreaded:
        _refuse_threads(arguments, *model.facts.unthreaded)
    if arguments.deadline is None:
        arguments.deadline = deadline_for(pass_seconds(spec), max(sizes), is_widened=model.is_widened)
    columns = min(width(), _WIDEST)
    if not (arguments.quiet or arguments.json):
        took, longest_s = pass_seconds(spec), arguments.deadline
        found = model_summary(model, optimizer, pass_s=took, limit_s=longest_s, width=columns)
        print(f"{arguments.model}\n{found}\n")
    # A case is a world and an oracle, each with a deadline; pytest's timeout is for code without one.
    limit_s = 3 * max(arguments.deadline, _LEAST_S)
    return judge_cases(
        arguments,
        f"--model={spec}",
        f"--timeout={limit_s}",
        render=partial(render, width=columns),
        lists_all=True,
    )


def _started(module: str | None, config: str | None) -> str:
    """Write the file for a module or a configuration, and tell so; returns the name of the model in it."""
    spec = write_start(module, config)
    print(f"wrote {spec.rpartition(':')[0]}: its data and loss are guesses; make them yours", file=sys.stderr)
    return spec


def wrapped_engines(
    engines: list[str] | None, options: Sequence[str] | None, wrap: str | None
) -> list[str] | None:
    """Return the names of engines with the options of --with and --wrap; raises UsageError for unreadable ones."""
    if not options and not wrap:
        return engines
    if not engines:
        raise UsageError(
            "--with and --wrap",
            expected="--engine too",
            got="none",
            hint="--engine NAME, whose options they are",
        )
    try:
        _, named = parse(f"({', '.join(options or ())})")
    except ValueError as error:
        got = " ".join(options or ())
        raise UsageError(
            "--with", expected="NAME=VALUE", got=got, hint=str(error).rpartition("; try ")[2]
        ) from error
    return [spelled(engine, named | ({"wrap": absolute(wrap)} if wrap else {})) for engine in engines]


def _worlds(arguments: argparse.Namespace) -> list[str]:
    return arguments.world or [options.DEFAULT_WORLD]


def _refuse_mistakes(arguments: argparse.Namespace) -> None:
    """Raise UsageError for what needs no study of the model: a folder that is taken, and misspelt names."""
    from shardproof.harness.runner.engines import describe

    if arguments.out:
        refuse_existing(Path(arguments.out))
    engines = arguments.engine or sorted(BUILT_IN)
    for name in engines:
        check_spelling(name)
    names = (*engines, *_worlds(arguments), arguments.model.rpartition(":")[2])
    for suite in suites(arguments.suite) if arguments.keyword else ():
        refuse_unknown_words(arguments.keyword, suite, names)
    for name in engines:
        if name not in BUILT_IN:
            describe(name)


def _refuse_threads(arguments: argparse.Namespace, because: str, instead: str) -> None:
    """Raise UsageError if ranks of some world are threads."""
    threads = [world for world in _worlds(arguments) if world.startswith("threads")]
    if threads:
        raise UsageError(
            f"model {arguments.model}",
            expected=f"worlds of processes, because {because}",
            got=", ".join(threads),
            hint=f"--world {threads[0].replace('threads', 'processes')}, or {instead}",
        )


def deadline_for(pass_s: float, num_ranks: int, *, is_widened: bool = True) -> float:
    """Return the deadline of a world or an oracle [s]; ``pass_s`` is the time of one forward and backward.

    Where the reference computes in the model's own dtypes, it rounds the result of each operator once more.
    """
    rounding = 1 if is_widened else _ROUNDING
    return round(_LEAST_S + _ALLOWANCE * _PASSES * num_ranks * pass_s * rounding)


COMMAND = Subcommand(
    help="judge engines on your own model",
    place=2,
    add_arguments=_add_arguments,
    run=_run,
    imports_users_code=True,
    joins_launcher=True,
    fills_launcher=True,
)
