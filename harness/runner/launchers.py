"""Launchers that start one process per rank: Shardproof starts its own ranks, so under one it runs nothing."""

from __future__ import annotations

from collections.abc import Mapping

from shardproof.harness.errors import UsageError

__all__ = ["refuse_launcher"]


def refuse_launcher(environment: Mapping[str, str]) -> None:
    """Raise UsageError in one of several processes of a launcher: each would judge everything by itself."""
    for launcher, rank, size in (
        ("torchrun", "RANK", "WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in environment else _NONE,
        ("a launcher of ranks", "RANK", "WORLD_SIZE") if "MASTER_ADDR" in environment else _NONE,
        ("srun", "SLURM_PROCID", "SLURM_NTASKS"),
    ):
        num = environment.get(size, "")
        if rank in environment and num.isdecimal() and int(num) > 1:
            raise UsageError(
                f"process {environment[rank]} of {num} of {launcher}",
                expected="one process, which starts the ranks of its worlds itself",
                got=f"{rank}={environment[rank]} and {size}={num}",
                hint=f"the command without {launcher}, with --world processes:{num}, or --shard in several jobs",
            )


_NONE = ("", "", "")
