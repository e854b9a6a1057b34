"""DeepSpeed's ZeRO-3 keeps gradients twice on the host when it offloads the optimizer. Needs torch and deepspeed.

deepspeed/runtime/zero/stage3.py#L791 has a flat buffer for gradients of all partitions; with offload_optimizer line
1338 makes another one for each group of copies, which stays: without it gradients of copies are dropped after a step.
Run: DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 deepspeed_zero3_offloaded_gradients.py
"""

import sys

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

# Take a step with and without offload, and look at what gradients are left.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else it compiles for a minute
dist.init_process_group("gloo")
rank = dist.get_rank()
for offload in ({}, {"offload_optimizer": {"device": "cpu"}}):
    model = nn.Linear(64, 64, bias=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **offload},
    }
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=config)
    engine.backward(engine(torch.ones(1, 64)).sum())
    engine.step()
    zero = engine.optimizer
    copies = [copy.grad for copy in zero.fp32_partitioned_groups_flat]
    kept = [zero.grad_partitions_flat_buffer, *(grad for grad in copies if grad is not None)]
    sizes = [grad.numel() for grad in kept]
    print(
        f"rank {rank}, offload {bool(offload)}: gradients of {sizes} elements; its share is 2048",
        flush=True,
    )
dist.barrier()
dist.destroy_process_group()
