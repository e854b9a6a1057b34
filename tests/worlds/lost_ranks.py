"""Engines whose last rank is lost in the middle of training; used by tests of launched worlds."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import torch
import torch.distributed as dist

from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.harness.worlds.processes.lineage import parent_of


class _PreparedDeath(PreparedDdp):
    num_backwards = 0

    def backward(self, loss: torch.Tensor) -> None:
        """End before the second backward."""
        self.num_backwards += 1
        if self.num_backwards == 2 and dist.get_rank() == dist.get_world_size() - 1:
            self.lose()
        super().backward(loss)

    def lose(self) -> None:
        print("about to be killed", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


class _PreparedHang(_PreparedDeath):
    def lose(self) -> None:
        threading.Event().wait()


class _PreparedLauncherDeath(_PreparedDeath):
    def lose(self) -> None:
        """Kill the process that the launcher started, above the fork server and its reaper; the first time only."""
        try:
            Path(os.environ["TMPDIR"], "lost").touch(exist_ok=False)
        except FileExistsError:
            return
        process = os.getpid()
        for _ in range(3):
            process = parent_of(process) or 0
        os.kill(process, signal.SIGKILL)


class IsKilled(DistributedDataParallelEngine):
    """Kills its last rank."""

    prepared_type = _PreparedDeath


class Hangs(DistributedDataParallelEngine):
    """Hangs on its last rank."""

    prepared_type = _PreparedHang


class LosesItsMachine(DistributedDataParallelEngine):
    """Kills the process that the launcher started for its last rank."""

    prepared_type = _PreparedLauncherDeath
