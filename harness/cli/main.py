"""Run the command line: parse the arguments, run one command, and turn errors into messages and exit codes."""

from __future__ import annotations

import argparse
import os
import pkgutil
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from shardproof.engine.registry import EngineNotFoundError
from shardproof.harness.cli import commands
from shardproof.harness.cli.exit_codes import INTERRUPTED, OUR_FAULT, USAGE
from shardproof.harness.cli.subcommand import Subcommand
from shardproof.harness.errors import ShardproofError, UsageError
from shardproof.harness.records.provenance import version_of
from shardproof.harness.runner.accelerator_worlds import concrete
from shardproof.harness.runner.interruption import interruptible
from shardproof.harness.runner.launchers import default_worlds, is_launched, join_launcher


def parser() -> argparse.ArgumentParser:
    """Make the parser; it sets ``command`` to a `Subcommand` of one of the files of `commands`."""
    made = argparse.ArgumentParser(
        prog="shardproof", description="Judge data-parallel training engines for PyTorch."
    )
    made.add_argument("--version", action="version", version=f"shardproof {version_of('shardproof')}")
    subparsers = made.add_subparsers(required=True, metavar="COMMAND")
    names = [module.name for module in pkgutil.iter_modules(commands.__path__)]
    found: dict[str, Subcommand] = {
        name: import_module(f"{commands.__name__}.{name}").COMMAND for name in names
    }
    for name, command in sorted(found.items(), key=lambda item: item[1].place):
        sub = subparsers.add_parser(name, help=command.help, description=command.run.__doc__)
        command.add_arguments(sub)
        sub.set_defaults(command=command)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code, see `exit_codes`."""
    _open_closed_streams()
    arguments = parser().parse_args(argv)
    command: Subcommand = arguments.command
    if command.imports_users_code:
        # A console script does not import modules from the current folder, where users keep their engines.
        sys.path.append(str(Path.cwd()))
    if command.fills_launcher:
        arguments.world = arguments.world or default_worlds(os.environ)
    try:
        if worlds := getattr(arguments, "world", None):
            arguments.world = [concrete(world) for world in worlds]
        with interruptible(or_terminated=is_launched(getattr(arguments, "world", None))):
            if command.joins_launcher:
                seed = getattr(arguments, "schedule_seed", 0)
                lent = join_launcher(os.environ, arguments.world, seed=seed)
                if lent is not None:
                    return lent
            return command.run(arguments)
    except BrokenPipeError:
        # The reader of our output has ended, as with `| head`; the files of the run are written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OUR_FAULT
    except KeyboardInterrupt:
        print("shardproof: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (UsageError, EngineNotFoundError) as error:
        print(f"shardproof: {error}", file=sys.stderr)
        return USAGE
    except ShardproofError as error:
        print(f"shardproof: {error}", file=sys.stderr)
        return OUR_FAULT


def _open_closed_streams() -> None:
    """Let standard streams that the caller closed lead nowhere; else the first files that open take their numbers."""
    for mode, name in zip("rww", ("stdin", "stdout", "stderr"), strict=True):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            os.set_inheritable(nowhere, True)
            setattr(sys, name, open(nowhere, mode))  # noqa: SIM115  # until the process ends


if __name__ == "__main__":
    sys.exit(main())
