"""DeepSpeed's overlap_comm overlaps nothing on a CPU: backward waits for each reduction. Needs torch and deepspeed.

accelerator/cpu_accelerator.py, Stream: None; runtime/zero/stage_1_and_2.py, average_tensor: no call is asynchronous
"""

import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

os.environ["DS_ACCELERATOR"] = "cpu"


def main(rank: int, store: str, size: int) -> None:
    """Ask for overlap, and look at the calls that are made in backward."""
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else it compiles for a minute
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
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

    def all_reduce(*args: Any, **named: Any) -> Any:
        are_async.append(bool(named.get("async_op")))
        return honest(*args, **named)

    dist.all_reduce = all_reduce
    engine.backward(engine(torch.ones(1, 64)).sum())
    dist.all_reduce = honest
    print(f"rank {rank}: {len(are_async)} reductions in backward, asynchronous: {sum(are_async)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, args=(tempfile.mktemp(), 2), nprocs=2)
