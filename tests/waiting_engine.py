"""An engine whose ranks never return from `prepare`, after they touch a file; used by tests."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine
from shardproof.engine.contract import Plan, PreparedModel


class Waits(DistributedDataParallelEngine):
    """Touch a file named ``waiting`` in the temporary folder, and wait for ever."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        Path(os.environ["TMPDIR"], "waiting").touch()
        threading.Event().wait()
        raise AssertionError


class Loops(DistributedDataParallelEngine):
    """Never return a version."""

    def version(self) -> str:
        while True:
            pass
