"""OLMo-core's MultiGroupDistributedDataParallel moves parameters that no loss reached. Needs torch and ai2-olmo-core.

olmo_core/nn/parallel/distributed.py, _bind_bucket_views: before any backward each gradient is a view of a bucket of
zeros, never None, so the optimizer decays weights and applies momentum where torch's DDP leaves a parameter alone.
"""

import tempfile

import torch
import torch.distributed as dist
from olmo_core.nn.parallel import MultiGroupDistributedDataParallel
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class HalfUsed(nn.Module):
    """Two layers, of which the loss needs one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.used(rows)


def moved(wrapped: nn.Module, model: HalfUsed) -> float:
    """Return how far a step moves the layer that no loss needs."""
    before = model.unused.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    wrapped(torch.rand(4, 2)).sum().backward()
    if isinstance(wrapped, MultiGroupDistributedDataParallel):
        wrapped.finalize_grad_reduce()
    optimizer.step()
    return (model.unused.weight - before).abs().max().item()


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
    first, second = HalfUsed(), HalfUsed()
    print("torch:", moved(DistributedDataParallel(first, find_unused_parameters=True), first))
    print("OLMo-core:", moved(MultiGroupDistributedDataParallel(second), second))
