"""DDP refuses a reentrant checkpoint where another layer goes unused. Needs torch alone.

Run: torchrun --nproc-per-node 2 ddp_reentrant_checkpoint.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    """A checkpointed layer, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Use two layers of three."""
        return checkpoint(self.second, self.first(rows), use_reentrant=True)


# Train one step.
dist.init_process_group("gloo")
model = DistributedDataParallel(Model(), find_unused_parameters=True)
model(torch.ones(1, 4)).sum().backward()
dist.destroy_process_group()
