"""DeepSpeed ZeRO-1 and ZeRO-2 keep the last of two backwards before a step. Needs torch and deepspeed.

deepspeed/runtime/zero/stage_1_and_2.py: each backward ends in the gradients of a step unless the engine was told, by
gradient_accumulation_steps or set_gradient_accumulation_boundary, that more will follow; ZeRO-3 and plain torch add up
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

os.environ["DS_ACCELERATOR"] = "cpu"


def main(rank: int, store: str, stage: int) -> None:
    """Step once on the gradients of two backwards, 1 and 10; print by how much a weight moved."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else it compiles for a minute
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    model = nn.Linear(1, 1, bias=False)
    before = model.weight.item()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
    }
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=config)
    for value in (1.0, 10.0):
        engine.backward(engine(torch.tensor([[value]])).sum())
    engine.step()
    moved = before - float(safe_get_full_fp32_param(model.weight))
    if rank == 0:
        print(f"ZeRO-{stage}: expected a step of 11, got one of {moved:.0f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for zero in (1, 2, 3):
        mp.spawn(main, args=(tempfile.mktemp(), zero), nprocs=2)
