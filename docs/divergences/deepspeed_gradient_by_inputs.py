"""torch.autograd.grad by inputs raises beside DeepSpeed ZeRO. Needs torch and deepspeed."""

import os
import sys
import tempfile
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

os.environ["DS_ACCELERATOR"] = "cpu"


def main(rank: int, store: str, stage: int) -> None:
    """Ask for the gradient of an input, as a gradient penalty or a saliency map does."""
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else it compiles for a minute
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    model = nn.Linear(2, 1, bias=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=config)
    rows = torch.ones(1, 2, requires_grad=True)
    try:
        (found,) = torch.autograd.grad(engine(rows).sum(), [rows])
        said = f"gradient {found.tolist()}"
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {error}, at {last.filename.partition('site-packages/')[2]}:{last.lineno}"
    if rank == 0:
        print(f"ZeRO-{stage}: {said}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for zero in (0, 1, 2, 3):
        mp.spawn(main, args=(tempfile.mktemp(), zero), nprocs=2)
