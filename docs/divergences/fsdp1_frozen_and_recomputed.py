"""A frozen and checkpointed block runs twice under FSDP1, as its input needs a gradient there. Needs torch alone.

torch/distributed/fsdp/_flat_param.py: a frozen parameter is a view of a flat parameter that has a gradient
Run: torchrun --nproc-per-node 2 fsdp1_frozen_and_recomputed.py
"""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.checkpoint import checkpoint

warnings.simplefilter("ignore")


class Block(nn.Linear):
    """Counts how often it runs, in a buffer."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Count, and compute."""
        self.runs += 1
        return super().forward(rows)


class Model(nn.Module):
    """The first two layers are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.block, self.head = nn.Linear(4, 4), Block(), nn.Linear(4, 4)
        for frozen in (self.entry, self.block):
            frozen.requires_grad_(False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Checkpoint the frozen block."""
        return self.head(checkpoint(self.block, self.entry(rows), use_reentrant=False))


# Train one step with and without FSDP1.
dist.init_process_group("gloo")
rank = dist.get_rank()
plain = Model()
wrapped = FullyShardedDataParallel(Model(), device_id=torch.device("cpu"), use_orig_params=True)
for model in (plain, wrapped):
    model(torch.ones(1, 4)).sum().backward()
print(f"rank {rank}: {plain.block.runs:.0f} run plain, {wrapped.block.runs:.0f} wrapped: expected as many")
dist.destroy_process_group()
