"""FSDP2 gathers a unit that runs twice again, and reduces what was held back apart. Needs torch alone.

torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, post_backward: runs for each call of the unit
Run: torchrun --nproc-per-node 2 fsdp2_unit_that_runs_twice.py
"""

from contextlib import ExitStack
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

COUNTED = ("all_gather_single", "reduce_scatter_single")


class Model(nn.Module):
    """A block that runs once or twice."""

    def __init__(self, num_runs: int) -> None:
        super().__init__()
        self.num_runs = num_runs
        self.first, self.block = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Run the block as often as asked."""
        rows = self.first(rows)
        for _ in range(self.num_runs):
            rows = torch.tanh(self.block(rows))
        return rows


# Count the collectives of a step whose first microbatch is held back, with units that stay gathered.
dist.init_process_group("gloo")
rank = dist.get_rank()
for num_runs in (1, 2):
    model, mesh = Model(num_runs), dist.init_device_mesh("cpu", (2,))
    for module in (model.block, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    with ExitStack() as patched:
        counts = [patched.enter_context(patch.object(dist, n, wraps=getattr(dist, n))) for n in COUNTED]
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            model(torch.ones(1, 4)).sum().backward()
    gathers, reductions = (count.call_count for count in counts)
    print(f"rank {rank}: the block runs {num_runs} times: {gathers} gathers, {reductions} reductions")
dist.destroy_process_group()
