"""DeepSpeed ZeRO-2 keeps whole gradients of parameters that a partition cuts. Needs torch and deepspeed.

deepspeed/runtime/zero/stage_1_and_2.py, copy_grads_in_partition: total_size adds up param_in_partition.numel()
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
    """Train one parameter with as many ranks as there are shares, and look at the gradients that are kept."""
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else it compiles for a minute
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    model = nn.Linear(64, 64, bias=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2},
    }
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=config)
    engine.backward(engine(torch.ones(1, 64)).sum())
    (piece, *_) = engine.optimizer.averaged_gradients[0]
    kept = piece.untyped_storage().nbytes() // piece.element_size()
    whole = model.weight.numel()
    print(
        f"rank {rank} keeps {kept} elements of a gradient of {whole}; its share is {whole // size}",
        flush=True,
    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, args=(tempfile.mktemp(), 4), nprocs=4)
