"""FSDP2 keeps all gradients twice where a parameter has its first gradient after the others. Needs torch alone.

torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_reduce: the new gradient is a view of the whole output
Run: torchrun --nproc-per-node 2 fsdp2_gradient_beside_others.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Model(nn.Module):
    """A large layer that each microbatch uses, and a small one that only some use."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(256, 256, bias=False), nn.Linear(256, 1, bias=False)

    def forward(self, rows: torch.Tensor, is_small_used: bool) -> torch.Tensor:
        """Run the large layer, and the small one if asked."""
        rows = self.large(rows)
        return self.small(rows) if is_small_used else rows


# Compare what gradients need with the memory that they keep, after two microbatches.
dist.init_process_group("gloo")
rank = dist.get_rank()
for uses in ((True, True), (False, True)):
    model = Model()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    for is_small_used in uses:
        model(torch.ones(1, 256), is_small_used).sum().backward()
    shards = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    kept = {shard.untyped_storage().data_ptr(): shard.untyped_storage().nbytes() for shard in shards}
    needed = sum(shard.nbytes for shard in shards)
    print(f"rank {rank}: the small layer runs {uses}: {needed} bytes needed, {sum(kept.values())} kept")
dist.destroy_process_group()
