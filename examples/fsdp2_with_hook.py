"""FSDP2 with an all-reduce hook, as who shards within a node and reduces across nodes by a hand of his own has one.

This hook changes nothing. Judge it with
``shardproof run --engine examples/fsdp2_with_hook.py:FullyShardWithHook --world threads:2 --suite races``.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from shardproof import Plan, PreparedModel
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine


class FullyShardWithHook(FullyShardEngine):
    """The adapter of FSDP2, with a hook on every unit."""

    name = "torch.fsdp2.hook"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard as FSDP2 does, then set the hook."""
        prepared = super().prepare(model, plan, mesh)
        for module in prepared.module.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(_touch)
        return prepared


def _touch(gradients: torch.Tensor) -> None:
    gradients.mul_(1)
