"""DeepSpeed ZeRO-1 and ZeRO-2 keep the last of two backwards before a step. Needs torch and deepspeed.

deepspeed/runtime/zero/stage_1_and_2.py: each backward ends in the gradients of a step unless the engine was told, by
gradient_accumulation_steps or set_gradient_accumulation_boundary, that more will follow; ZeRO-3 and plain torch add up
Run: DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 deepspeed_two_backwards.py
"""

import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

# Step once on the gradients of two backwards, 1 and 10; print by how much a weight moved.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else it compiles for a minute
dist.init_process_group("gloo")
rank = dist.get_rank()
for stage in (1, 2, 3):
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
dist.destroy_process_group()
