"""DDP reduces what no_sync was to hold back, after a forward whose loss was dropped. Needs torch alone.

torch/csrc/distributed/c10d/reducer.cpp, prepare_for_backward: arms the hooks of the next backward, whichever that is
Run: torchrun --nproc-per-node 2 ddp_dropped_forward.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Hold one microbatch back, with and without a forward before it whose loss never goes backward.
dist.init_process_group("gloo")
rank = dist.get_rank()
rows = torch.full((1, 4), float(rank + 1))
for is_dropped in (False, True):
    model = DistributedDataParallel(nn.Linear(4, 4))
    if is_dropped:
        model(rows)
    with model.no_sync():
        model(rows).sum().backward()
    held = model.module.weight.grad[0, 0].item()
    print(f"rank {rank}: a forward was dropped: {is_dropped}: holds {held}, its own is {rank + 1.0}")
dist.destroy_process_group()
