"""Gradients of FSDP2 are wrong where a checkpointed unit runs twice before one backward. Needs torch alone.

torch/distributed/fsdp/_fully_shard/_fsdp_state.py: a backward inside a reentrant checkpoint ends as a whole one does
Run: torchrun --nproc-per-node 2 fsdp2_reentrant_checkpoints.py
"""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    """A layer that runs twice, checkpointed each time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Run the block twice."""
        rows = self.first(rows)
        for _ in range(2):
            rows = checkpoint(self.block, rows, use_reentrant=True)
        return rows


# Compare the gradient of the block with one process.
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
alone, mesh = Model(), dist.init_device_mesh("cpu", (2,))
model = copy.deepcopy(alone)
for module in (model.block, model):
    fully_shard(module, mesh=mesh)
owned = model.block.bias
for each in (alone, model):
    each(torch.ones(1, 4)).sum().backward()
got, expected = owned.grad.full_tensor(), alone.block.bias.grad
print(f"rank {rank}: gradient {got.tolist()}, expected {expected.tolist()}")
dist.destroy_process_group()
