"""Reads the environment of the launcher that started this process: torchrun, srun, or another that sets RANK."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from zlib import crc32

from shardproof.harness.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedProcess:
    """One of the processes that a launcher started: its rank, and the address where all of them can meet.

    ``node`` is the launcher's number of the machine, if it has one. ``num_restarts`` counts how often the launcher has
    started all processes again.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    node: str
    address: str
    port: int
    num_restarts: int = 0


def rank_environment(
    rank: int, size: int, *, local_rank: int, local_size: int, address: str
) -> dict[str, str]:
    """Return the variables that launchers set for a rank, except the port."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": address,
    }


def find_launched_process(environment: Mapping[str, str]) -> LaunchedProcess | None:
    """Read the environment of a launcher; returns None if there is none."""
    return _by_rank(environment) or _by_slurm(environment)


def launched_process(environment: Mapping[str, str]) -> LaunchedProcess:
    """Read the environment of a launcher; raises UsageError if there is none."""
    found = find_launched_process(environment)
    if found is None:
        raise UsageError(
            "--world launched",
            expected="a launcher's RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or those of srun",
            got="an environment without them",
            hint="torchrun --nproc-per-node 4 -m shardproof run ... --world launched",
        )
    return found


def _by_rank(environment: Mapping[str, str]) -> LaunchedProcess | None:
    rank, size, port = (_number(environment, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    address = environment.get("MASTER_ADDR", "")
    if rank is None or not size or port is None or not address:
        return None
    return LaunchedProcess(
        launcher="torchrun" if "TORCHELASTIC_RUN_ID" in environment else "a launcher of ranks",
        rank=rank,
        size=size,
        local_rank=_number(environment, "LOCAL_RANK") or 0,
        node=environment.get("GROUP_RANK", ""),
        address=address,
        port=port,
        num_restarts=_number(environment, "TORCHELASTIC_RESTART_COUNT") or 0,
    )


def _by_slurm(environment: Mapping[str, str]) -> LaunchedProcess | None:
    """Read the variables of srun; its first task is on the first node, and a step has a port of its own."""
    rank, size = (_number(environment, name) for name in ("SLURM_PROCID", "SLURM_NTASKS"))
    first = re.match(r"([^,\[]+)(?:\[(\d+))?", environment.get("SLURM_STEP_NODELIST", ""))
    if rank is None or not size or first is None:
        return None
    step = "/".join(environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return LaunchedProcess(
        launcher="srun",
        rank=rank,
        size=size,
        local_rank=_number(environment, "SLURM_LOCALID") or 0,
        node=environment.get("SLURM_NODEID", ""),
        address=environment.get("MASTER_ADDR") or first[1] + (first[2] or ""),
        port=_number(environment, "MASTER_PORT") or 20_000 + crc32(step.encode()) % 10_000,
        num_restarts=_number(environment, "SLURM_RESTART_COUNT") or 0,
    )


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None
