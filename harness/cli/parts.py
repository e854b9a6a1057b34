"""The options of ``shardproof run`` that run a part: a shard, the rest of a run, or its failures."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardproof.harness.cli.subcommand import RUNS
from shardproof.harness.errors import UsageError
from shardproof.harness.records.record import Verdict
from shardproof.harness.records.run import RUN, read_run
from shardproof.harness.worlds.launched.launcher import LaunchedProcess


def resolve_parts(arguments: argparse.Namespace) -> None:
    """Check the options, and choose the run of --last-failed; raises UsageError for an impossible folder or shard.

    The failures of that run also select engines, worlds and suites, unless the caller does.
    """
    if arguments.shard is not None:
        from shardproof.harness.runner.selection import RunShard  # here, because it imports pytest

        RunShard.parse(arguments.shard)
    if arguments.durations is not None:
        if arguments.shard is None:
            raise UsageError("--durations", expected="--shard too", got="none", hint="--shard 1/8")
        read_run(Path(arguments.durations))
    if arguments.resume is not None:
        read_run(Path(arguments.resume))
    if arguments.last_failed is not None:
        arguments.last_failed = _choose_last_failed(arguments)


def take_up(arguments: argparse.Namespace, process: LaunchedProcess) -> Path | None:
    """If a launcher restarted its processes, resume the last run, in a new folder beside it.

    Returns that run's folder if nothing of it is left to run: launchers also restart processes that end with an exit
    code.
    """
    if not process.num_restarts or arguments.out is None:
        return None
    out = Path(arguments.out)
    attempts = [out, *(out.with_name(f"{out.name}-restart{n}") for n in range(1, process.num_restarts + 1))]
    arguments.out = str(attempts.pop())
    earlier = [folder for folder in attempts if (folder / RUN).exists()]
    if not earlier:
        return None
    run = read_run(earlier[-1])
    if not run.is_interrupted and all(record.verdict is not Verdict.NOT_RUN for record in run.records):
        return earlier[-1]
    arguments.resume = str(earlier[-1])
    return None


def _choose_last_failed(arguments: argparse.Namespace) -> Path:
    folder = Path(arguments.last_failed) if arguments.last_failed else _newest()
    failed = [record for record in read_run(folder).records if not record.verdict.is_conforming]
    if not failed:
        raise UsageError(
            f"--last-failed {folder}",
            expected="a run with records that do not conform",
            got="none",
            hint="leaving it out",
        )
    arguments.engine = arguments.engine or list(dict.fromkeys(record.engine for record in failed))
    arguments.world = arguments.world or list(dict.fromkeys(record.world for record in failed))
    arguments.suite = arguments.suite or sorted({record.suite for record in failed})
    return folder


def _newest() -> Path:
    runs = sorted((file.stat().st_mtime, file.parent) for file in RUNS.glob(f"*/{RUN}"))
    if not runs:
        raise UsageError(
            "--last-failed", expected=f"a run below {RUNS}/", got="none", hint="naming the folder of a run"
        )
    return runs[-1][1]
