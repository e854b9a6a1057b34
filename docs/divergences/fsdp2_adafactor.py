"""Adafactor raises on the parameters that fully_shard makes. Needs torch alone.

torch/optim/_adafactor.py, _single_tensor_adafactor: row_mean.norm(...).square_() on a norm that is partial over ranks
Run: torchrun --nproc-per-node 2 fsdp2_adafactor.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

# Train one step with each implementation.
dist.init_process_group("gloo")
rank = dist.get_rank()
for foreach in (False, True):
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.Adafactor(model.parameters(), foreach=foreach)
    model(torch.ones(1, 4)).sum().backward()
    try:
        optimizer.step()
    except Exception as error:
        print(f"rank {rank}, foreach={foreach}: {type(error).__name__}: {str(error)[:160]}")
    else:
        print(f"rank {rank}, foreach={foreach}: steps")
dist.destroy_process_group()
