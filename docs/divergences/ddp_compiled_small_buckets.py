"""DDP cannot be compiled with buckets below a mebibyte. Needs torch alone.

torch/_dynamo/backends/distributed.py, DDPOptimizer: its first bucket, of one mebibyte, may not be the larger one
"""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
    for size in (0.5, 1.0):
        model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), bucket_cap_mb=size)
        model.compile(backend="aot_eager")
        try:
            model(torch.ones(1, 4)).sum().backward()
            print(f"buckets of {size} MiB: trained")
        except AssertionError as error:
            print(f"buckets of {size} MiB: {error}")
    dist.destroy_process_group()
