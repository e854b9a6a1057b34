"""The command ``shardproof explore``: draw programs, judge them, shrink and save those that fail."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from shardproof.engine.registry import check_spelling
from shardproof.harness.cli.exit_codes import CONFORMS, DOES_NOT_CONFORM
from shardproof.harness.cli.subcommand import RUNS, Subcommand, add_effort, effort_of
from shardproof.harness.runner import options
from shardproof.harness.runner.accelerator_worlds import concrete
from shardproof.harness.runner.invoke import check_temporary_folder
from shardproof.harness.worlds.spec import WorldSpec


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", dest="one_engine", required=True, metavar="NAME")
    parser.add_argument(
        "--world",
        dest="one_world",
        default=options.DEFAULT_WORLD,
        metavar="KIND:SIZE",
        help=f"default: {options.DEFAULT_WORLD}",
    )
    parser.add_argument("--minutes", type=float, default=5.0, metavar="M", help="default: 5")
    parser.add_argument("--programs", type=int, metavar="N", help="stop after N programs")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the draws; default: 0")
    options.OUT.add_to(parser.add_argument, default_text="conformance/explore-NAME")
    options.DEADLINE.add_to(parser.add_argument)
    add_effort(parser)
    parser.add_argument(
        "--script", metavar="PROGRAM", help="print this program as a script for torchrun; judge none"
    )


def _run(arguments: argparse.Namespace) -> int:
    """Judge programs drawn from a space of traits, options and moves; shrink failures, and save them.

    Programs that failed before come first: the bundled ones and those in DIR/found.txt. Returns 1 for new failures.
    """
    arguments.one_world = concrete(arguments.one_world)
    import torch

    from shardproof.fixtures.programs.laws import laws_of
    from shardproof.fixtures.programs.space import space_of
    from shardproof.fixtures.programs.training import training_of
    from shardproof.harness.cases.space import Program
    from shardproof.harness.cli.findings import known_programs, print_script, write_finding, write_progress
    from shardproof.harness.runner.cell import Cell
    from shardproof.harness.runner.engines import describe
    from shardproof.harness.runner.exploration import Exploration, Hunt
    from shardproof.harness.tracing.arcs import COUNTS_ARCS, can_count
    from shardproof.harness.worlds.processes.forkserver import draw_hash_seeds, warm_up

    engine, effort = arguments.one_engine, effort_of(arguments)
    if arguments.script is not None:
        return print_script(arguments.script, engine, arguments.one_world)
    check_temporary_folder()
    out = Path(arguments.out or RUNS / f"explore-{engine.replace('/', '-')}")
    started = time.monotonic()
    check_spelling(engine)
    torch.set_num_threads(1)
    draw_hash_seeds(effort.seed)
    warm_up(arguments.deadline)
    world = WorldSpec.parse(arguments.one_world, deadline_s=arguments.deadline)
    space = space_of(describe(engine).capabilities, world.size)
    cell = Cell(engine=engine, world=world)
    exploration = Exploration(space=space, training=training_of, laws=laws_of, cell=cell, effort=effort)
    hunt = Hunt(exploration=exploration, seed=arguments.seed)
    if not can_count():
        print(
            f"the engine's code is not counted: {COUNTS_ARCS} is missing, or a debugger traces",
            file=sys.stderr,
        )
    plain = hunt.failing(Program())
    if plain is not None:
        write_finding(plain, engine, arguments.one_world, out)
        print(f"the plain program fails, so others show nothing more: {plain.symptom}; see {out}")
        return DOES_NOT_CONFORM
    known = [p for p in known_programs(out) if space.has(p)]
    hunt.findings += [f for p in known if (f := hunt.failing(p)) is not None]
    failing = "".join(f"\n  {finding.program}: {finding.symptom}" for finding in hunt.findings)
    print(f"{len(known)} known programs: {len(hunt.findings)} fail{failing}", flush=True)
    num_new = 0  # others fail as a known program does, with other values in other dimensions
    try:
        until = started + 60 * arguments.minutes
        for finding in hunt.run(until=until, num_programs=arguments.programs):
            num_new += 1
            write_finding(finding, engine, arguments.one_world, out)
            print(f"{finding.program}\n  {finding.symptom}", flush=True)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    write_progress(hunt.progress, out, started)
    verdicts = ", ".join(f"{n} {verdict}" for verdict, n in sorted(hunt.verdicts.items()))
    print(
        f"{hunt.num_judged} programs in {time.monotonic() - started:.0f} s: {verdicts}; "
        f"{len(hunt.combinations_seen)} of {len(space.combinations)} combinations seen; "
        f"{len(exploration.arcs)} arcs of the engine run; {num_new} new failures in {out}"
    )
    # A known program that fails here may have failed on another engine.
    return DOES_NOT_CONFORM if hunt.findings else CONFORMS


COMMAND = Subcommand(
    help="judge programs drawn by seed",
    place=3,
    add_arguments=_add_arguments,
    run=_run,
    imports_users_code=True,
)
