"""A unit that is frozen in the first forward is reduced in bfloat16 once it trains: backward raises. Needs torch alone.

torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, _init_mp_dtypes: what trains in the first forward
"""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def main() -> None:
    """Evaluate while the layer is frozen, then train it."""
    dist.init_process_group("gloo", store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = nn.Linear(4, 4).requires_grad_(False)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)), mp_policy=policy)
    with torch.no_grad():
        model(torch.ones(1, 4))
    model.requires_grad_()
    model(torch.ones(1, 4)).sum().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
