"""Run the command line: parse the arguments, run one command, and turn errors into messages and exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from shardproof.engine.registry import EngineNotFoundError
from shardproof.harness.cli import commands
from shardproof.harness.cli.exit_codes import INTERRUPTED, OUR_FAULT, USAGE
from shardproof.harness.cli.parser import parser
from shardproof.harness.errors import ShardproofError, UsageError
from shardproof.harness.runner.interruption import interruptible
from shardproof.harness.runner.launchers import default_worlds, is_launched, join_launcher


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code, see `exit_codes`."""
    arguments = parser().parse_args(argv)
    if arguments.command in {commands.run, commands.check, commands.explore, commands.mutants}:
        # A console script does not import modules from the current folder, where users keep their engines.
        sys.path.append(str(Path.cwd()))
    if arguments.command in {commands.run, commands.check}:
        arguments.world = arguments.world or default_worlds(os.environ)
    try:
        with interruptible(or_terminated=is_launched(getattr(arguments, "world", None))):
            if arguments.command in {commands.run, commands.check, commands.mutants}:
                seed = getattr(arguments, "schedule_seed", 0)
                lent = join_launcher(os.environ, arguments.world, seed=seed)
                if lent is not None:
                    return lent
            code: int = arguments.command(arguments)
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
    return code


if __name__ == "__main__":
    sys.exit(main())
