"""Reentrant checkpoints that share a unit of FSDP1: the second is recomputed with freed memory. Needs torch alone.

torch/distributed/fsdp/_runtime_utils.py: the backward inside the first checkpoint ends as a whole one does
Run: torchrun --nproc-per-node 2 fsdp1_reentrant_checkpoints.py
"""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint

warnings.simplefilter("ignore")


class Model(nn.Module):
    """Two checkpointed layers behind another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Checkpoint all but the first layer, whose output needs a gradient."""
        rows = self.layers[0](rows)
        for layer in self.layers[1:]:
            rows = checkpoint(layer, rows, use_reentrant=True)
        return rows


# Train two steps.
dist.init_process_group("gloo")
model = FullyShardedDataParallel(Model(), device_id=torch.device("cpu"), use_orig_params=True)
for _ in range(2):
    model(torch.ones(1, 4)).sum().backward()
dist.destroy_process_group()
