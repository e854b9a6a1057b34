"""FSDP1 clips by the largest norm of all steps so far where a rank has no gradient. Needs torch alone.

torch/distributed/fsdp/fully_sharded_data_parallel.py, clip_grad_norm_: a rank without gradients takes a zero that the
wrapper keeps, and the maximum over ranks is written into it
Run: torchrun --nproc-per-node 2 fsdp1_norm_of_earlier_steps.py
"""

import math
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

warnings.simplefilter("ignore")

# The frozen first layer fills the first rank's half of the flat parameter, so that this rank has no gradient.
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(64, 4), nn.Linear(4, 4))
model[0].requires_grad_(False)
wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
for step, rows in enumerate((8.0, 4.0, 2.0)):
    wrapped.zero_grad()
    (rows * wrapped(torch.ones(2, 64))).sum().backward()
    norm = wrapped.clip_grad_norm_(math.inf, norm_type=math.inf)
    own = [p.grad.abs().max() for p in wrapped.parameters() if p.grad is not None and p.grad.numel()]
    largest = torch.stack([*own, torch.zeros(())]).max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"step {step}: norm {norm:.3f}, largest gradient {largest:.3f}", flush=True)
dist.destroy_process_group()
