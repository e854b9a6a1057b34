"""torch.autograd.grad by inputs raises beside DeepSpeed ZeRO. Needs torch and deepspeed.

Run: DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 deepspeed_gradient_by_inputs.py
"""

import sys
import traceback

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

# Ask for the gradient of an input, as a gradient penalty or a saliency map does.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else it compiles for a minute
dist.init_process_group("gloo")
rank = dist.get_rank()
for stage in (0, 1, 2, 3):
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
dist.destroy_process_group()
