"""A layer that is frozen after a forward trains on in the next step. Needs torch alone.

torchrun --nproc-per-node 2 this_file.py. torch/distributed/fsdp/_fully_shard/_fsdp_param.py: after a forward that keeps
a unit gathered, the module shows the whole parameters, and only they are frozen
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Evaluate, freeze the layer for good, and train two steps."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(torch.ones(2, 4))
    model[1].requires_grad_(False)
    for step in range(2):
        model(torch.ones(2, 4)).sum().backward()
        if dist.get_rank() == 0:
            print(f"step {step}: the frozen layer has a gradient: {model[1].weight.grad is not None}")
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
