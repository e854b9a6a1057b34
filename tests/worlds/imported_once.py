"""A module that an engine preloads: it records the process that imported it, and prints."""

from __future__ import annotations

import os

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine
from shardproof.engine.contract import Plan, PreparedModel

print("imported")
_IMPORTER = os.getpid()


class ImportsItsModule(DistributedDataParallelEngine):
    """DDP that refuses to run where its module was imported by the rank itself."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        if os.getpid() == _IMPORTER:
            raise RuntimeError("this rank has imported the module anew")
        return super().prepare(model, plan, mesh)


class WantsItsModule(ImportsItsModule):
    """Preloads its module."""

    preload = (__name__,)


class WantsWhatIsMissing(ImportsItsModule):
    """Preloads a module that does not exist."""

    preload = ("tests.no_such_module",)
