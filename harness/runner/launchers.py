"""Launchers that start one process per rank: one of them judges, and the others serve its launched worlds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardproof.harness.errors import UsageError
from shardproof.harness.worlds.launched.launcher import find_launched_process, launched_process
from shardproof.harness.worlds.spec import WorldKind


def is_launched(worlds: Sequence[str] | None) -> bool:
    """Whether one of the worlds, as spelled on the command line, uses the ranks of a launcher."""
    return any(world.partition(":")[0] == WorldKind.LAUNCHED for world in worlds or ())


def default_worlds(environment: Mapping[str, str]) -> list[str] | None:
    """Return the world of a launcher's processes, if it started several; None keeps the default."""
    process = find_launched_process(environment)
    return [WorldKind.LAUNCHED.value] if process is not None and process.size > 1 else None


def join_launcher(environment: Mapping[str, str], worlds: Sequence[str] | None, *, seed: int) -> int | None:
    """Return None in process 0 of a launcher, which judges; other processes serve it, and return an exit code.

    Raises UsageError under a launcher if no world uses its ranks, and without a launcher if a world needs one.
    """
    if not is_launched(worlds):
        refuse_launcher(environment)
        return None
    process = launched_process(environment)
    if process.rank:
        from shardproof.harness.worlds.launched.agent import serve  # here, because it imports torch

        return serve(process)
    from shardproof.harness.worlds.launched.cluster import open_cluster

    open_cluster(process, seed)
    return None


def refuse_launcher(environment: Mapping[str, str]) -> None:
    """Raise UsageError in one of several processes of a launcher: each would judge everything itself."""
    for launcher, rank, size in (
        ("torchrun", "RANK", "WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in environment else _NONE,
        ("a launcher of ranks", "RANK", "WORLD_SIZE") if "MASTER_ADDR" in environment else _NONE,
        ("srun", "SLURM_PROCID", "SLURM_NTASKS"),
    ):
        num = environment.get(size, "")
        if rank in environment and num.isdecimal() and int(num) > 1:
            raise UsageError(
                f"process {environment[rank]} of {num} of {launcher}",
                expected="--world launched, which takes these processes as ranks, or one process alone",
                got=f"{rank}={environment[rank]} and {size}={num}",
                hint=f"--world launched; or without {launcher} --world processes:{num}, or --shard in several jobs",
            )


_NONE = ("", "", "")
