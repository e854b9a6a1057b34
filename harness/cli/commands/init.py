"""The command ``shardproof init``: write the file that `check` reads, as a start."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardproof.engine.names import absolute
from shardproof.harness.cli.exit_codes import CONFORMS
from shardproof.harness.cli.subcommand import Subcommand
from shardproof.harness.errors import UsageError

__all__ = ["COMMAND", "write_start"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    named = parser.add_mutually_exclusive_group(required=True)
    named.add_argument(
        "module", nargs="?", metavar="MODULE", help="path/to/file.py:Net or package.module:Net"
    )
    named.add_argument("--hf", metavar="CONFIG", help="a configuration of transformers, such as LlamaConfig")
    parser.add_argument(
        "--to", metavar="FILE", type=Path, help="default: check_NAME.py in the current folder"
    )


def _run(arguments: argparse.Namespace) -> int:
    """Write the file that `check` reads, as a start: a module of yours, or a small model of transformers.

    MODULE is a class of torch.nn.Module without arguments. Its first layer tells what data it takes. CONFIG is the name
    of a configuration, whose model is built with small sizes and random weights; nothing is downloaded.
    """
    spec = write_start(arguments.module, arguments.hf, arguments.to)
    print(
        f"wrote {spec.rpartition(':')[0]}: make it your model, then\n  shardproof check {spec} --engine torch.fsdp2"
    )
    return CONFORMS


def write_start(module: str | None, config: str | None, file: Path | None = None) -> str:
    """Write the file for a module or a configuration; returns the name of the class in it, as `check` takes it."""
    from shardproof.harness.runner.user_model.start import written_start
    from shardproof.harness.worlds.processes.forkserver import forkserver_context

    forkserver_context()
    start = written_start(config or absolute(module or ""), is_config=config is not None)
    file = file or Path(f"check_{start.name.lower()}.py")
    if file.exists():
        raise UsageError(
            f"file {file}",
            expected="none there yet",
            got="one",
            hint=f"shardproof check {file}:{start.name}, if it is that of this model, or --to FILE",
        )
    file.write_text(start.text)
    return f"{file}:{start.name}"


COMMAND = Subcommand(
    help="write the file that `check` reads, as a start",
    place=1,
    add_arguments=_add_arguments,
    run=_run,
    imports_users_code=True,
)
