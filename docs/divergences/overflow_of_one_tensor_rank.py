"""Under tensor parallelism and sharding, ranks disagree whether gradients overflow. Needs torch alone.

torchrun --nproc-per-node 4 this_file.py. torch/distributed/tensor/_dispatch.py, found_inf_reduce_handler: the flag is
combined over the axes over which the first gradient is sharded
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def main() -> None:
    """Let one element of a gradient overflow on the last rank, which has a part of the second layer alone."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parallelize_module(model, mesh["tensor"], {"1": ColwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    gradient = model[1].weight.grad
    assert isinstance(gradient, DTensor)
    if dist.get_rank() == 3:
        gradient.to_local()[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    print(f"rank {dist.get_rank()}: the scale is {scaler.get_scale()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
