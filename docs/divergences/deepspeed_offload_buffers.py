"""DeepSpeed's offload keeps two buffers of the largest parameter's size on each rank. Needs torch and deepspeed.

deepspeed/runtime/zero/stage_1_and_2.py#L653: temp_grad_buffer_for_cpu_offload and temp_grad_buffer_for_gpu_offload
Run: DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 deepspeed_offload_buffers.py
"""

import sys

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

# Shard one parameter, and look at what lies beside the share.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else it compiles for a minute
dist.init_process_group("gloo")
rank = dist.get_rank()
size = dist.get_world_size()
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
