"""A conversion that fails on a gradient leaves its parameter without one. Needs torch alone.

torch/nn/modules/module.py, _apply: takes the gradient of a DTensor away while it is converted
"""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def convert(tensor: torch.Tensor) -> torch.Tensor:
    """Convert parameters, and fail for gradients."""
    if not isinstance(tensor, nn.Parameter):
        raise MemoryError
    return tensor.clone()


def main() -> None:
    """Convert the parameter, and fail to convert its gradient; a plain module keeps it."""
    dist.init_process_group("gloo", store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
    for is_sharded in (False, True):
        model = nn.Linear(4, 4, bias=False)
        if is_sharded:
            fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
        model(torch.ones(1, 4)).sum().backward()
        try:
            model._apply(convert)
        except MemoryError:
            print("sharded" if is_sharded else "plain", "gradient lost:", model.weight.grad is None)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
