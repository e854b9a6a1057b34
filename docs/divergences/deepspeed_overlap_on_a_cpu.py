"""DeepSpeed's overlap_comm overlaps nothing on a CPU: backward waits for each reduction. Needs torch and deepspeed.

accelerator/cpu_accelerator.py, Stream: None; runtime/zero/stage_1_and_2.py, average_tensor: no call is asynchronous
Run: DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 deepspeed_overlap_on_a_cpu.py
"""

import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

# Ask for overlap, and look at the calls that are made in backward.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else it compiles for a minute
dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
zero = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 64}
config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": zero,
}
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=config)
are_async: list[bool] = []
honest = dist.all_reduce


def _all_reduce(*args: Any, **named: Any) -> Any:
    are_async.append(bool(named.get("async_op")))
    return honest(*args, **named)


dist.all_reduce = _all_reduce
engine.backward(engine(torch.ones(1, 64)).sum())
dist.all_reduce = honest
print(f"rank {rank}: {len(are_async)} reductions in backward, asynchronous: {sum(are_async)}", flush=True)
dist.destroy_process_group()
