"""fairscale's ShardedDataParallel reduces a part of a gradient where a layer runs in two reentrant checkpoints.

fairscale/nn/data_parallel/sharded_ddp.py, _get_reduce_fn: a parameter is reduced the first time that it has a gradient,
and each checkpoint has a backward of its own. Needs torch and fairscale.
Run: torchrun --nproc-per-node 2 fairscale_reentrant_checkpoints.py
"""

import warnings

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim.oss import OSS
from torch import nn
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    """A layer that runs twice, each time in a checkpoint if asked."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.again = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
        self.checkpoints = checkpoints

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Run it."""
        rows = self.first(rows)
        for _ in range(2):
            rows = checkpoint(self.again, rows, use_reentrant=True) if self.checkpoints else self.again(rows)
        return rows


# Print the layer's gradient on the rank that updates it, with checkpoints and without.
warnings.simplefilter("ignore")
dist.init_process_group("gloo")
rank = dist.get_rank()
for checkpoints in (False, True):
    model = Model(checkpoints)
    oss = OSS(model.parameters(), optim=torch.optim.SGD, lr=0.1)
    wrapped = ShardedDataParallel(model, oss, reduce_buffer_size=0)
    wrapped(torch.full((1, 2), rank + 1.0)).sum().backward()
    if model.again.weight.grad is not None:
        print(f"checkpoints={checkpoints}, rank {rank}: {model.again.weight.grad.tolist()}", flush=True)
    dist.barrier()
