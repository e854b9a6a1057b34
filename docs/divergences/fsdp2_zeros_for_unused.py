"""A parameter that no rank used moves under fully_shard, and rests under DDP. Needs torch alone.

torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, reduce_scatter_unused_params
Run: torchrun --nproc-per-node 2 fsdp2_zeros_for_unused.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


class Experts(nn.Module):
    """Two experts, the second of which gets no row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        nn.init.ones_(self.second.weight)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Run the first expert."""
        output: torch.Tensor = self.first(rows)
        return output


# Train one step each, and print the first element of the second expert, which was 1.
dist.init_process_group("gloo")
rank = dist.get_rank()
sharded = fully_shard(Experts(), mesh=dist.init_device_mesh("cpu", (2,)))
sharded.set_reduce_scatter_unused_params(True)
replicated = DistributedDataParallel(Experts(), find_unused_parameters=True)
for name, model in (("fully_shard", sharded), ("DDP", replicated)):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    *_, weight = model.parameters()
    element = (weight.full_tensor() if name == "fully_shard" else weight)[0, 0].item()
    if rank == 0:
        print(f"{name}: {element:.4f}")
dist.destroy_process_group()
