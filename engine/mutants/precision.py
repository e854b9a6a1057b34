"""Mutants that compute or communicate in another dtype than was asked."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine.adapters.torch_fsdp2 import FullyShardEngine
from engine.contract import Plan, PreparedModel

__all__ = ["ReducesInBfloat16"]


class ReducesInBfloat16(FullyShardEngine):
    """Gradients lose 16 of their 24 significant bits on the way, whatever dtype the plan names.

    After pytorch/pytorch#190626: the reduction ran before the cast to the dtype asked for.
    """

    name = "mutant.ReducesInBfloat16"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, under another plan."""
        return super().prepare(model, replace(plan, reduce_dtype=torch.bfloat16), mesh)
