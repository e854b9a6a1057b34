"""DeepSpeed ZeRO-2 raises where a layer runs in two reentrant checkpoints. Needs torch and deepspeed.

deepspeed/runtime/zero/stage_1_and_2.py: each checkpoint has a backward of its own, and a parameter is reduced once
Run: DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 deepspeed_reentrant_checkpoints.py
"""

import sys

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    """A layer that runs twice, each time in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Run it."""
        once = checkpoint(self.again, self.first(rows), use_reentrant=True)
        return checkpoint(self.again, once, use_reentrant=True)


# Run one backward.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else it compiles for a minute
dist.init_process_group("gloo")
rank = dist.get_rank()
for stage in (1, 2, 3):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
    }
    model = Model()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=config)
    try:
        engine.backward(engine(torch.ones(1, 2)).sum())
        said = "trains"
    except Exception as error:
        said = f"{type(error).__name__}: {str(error)[:80]}"
    if rank == 0:
        print(f"ZeRO-{stage}: {said}", flush=True)
