"""DeepSpeed ZeRO-2 keeps whole gradients of parameters that a partition cuts. Needs torch and deepspeed.

deepspeed/runtime/zero/stage_1_and_2.py, copy_grads_in_partition: total_size adds up param_in_partition.numel()
Run: DS_ACCELERATOR=cpu torchrun --nproc-per-node 4 deepspeed_zero2_whole_gradients.py
"""

import sys

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

# Train one parameter with as many ranks as there are shares, and look at the gradients that are kept.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else it compiles for a minute
dist.init_process_group("gloo")
rank = dist.get_rank()
size = dist.get_world_size()
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
