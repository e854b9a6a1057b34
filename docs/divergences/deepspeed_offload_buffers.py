"""DeepSpeed's offload keeps two buffers of the largest parameter's size on each rank. Needs torch and deepspeed.

deepspeed/runtime/zero/stage_1_and_2.py#L653: temp_grad_buffer_for_cpu_offload and temp_grad_buffer_for_gpu_offload
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

os.environ["DS_ACCELERATOR"] = "cpu"


def main(rank: int, store: str, size: int) -> None:
    """Shard one parameter, and look at what lies beside the share."""
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else it compiles for a minute
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    model = nn.Linear(64, 64, bias=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=config)
    sides = (
        engine.optimizer.temp_grad_buffer_for_cpu_offload,
        engine.optimizer.temp_grad_buffer_for_gpu_offload,
    )
    kept = [buffer.numel() for buffer in sides]
    share = model.weight.numel() // size
    print(f"rank {rank} keeps buffers of {kept} elements; its share is {share}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, args=(tempfile.mktemp(), 2), nprocs=2)
