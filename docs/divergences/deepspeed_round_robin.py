"""DeepSpeed's getters return other parameters' values under round_robin_gradients. Needs torch and deepspeed.

deepspeed/runtime/zero/stage_1_and_2.py, _link_all_hp_params: the flat partitions hold parameters in the order of
round_robin_bit16_groups, and unless there is padding the offsets are those in the order of bit16_groups
Run: DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 deepspeed_round_robin.py
"""

import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

# Name the parameters whose float32 copy is not theirs, before any step.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else it compiles for a minute
dist.init_process_group("gloo")
rank = dist.get_rank()
for in_turn in (False, True):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1, "round_robin_gradients": in_turn},
    }
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    deepspeed.initialize(model=model, optimizer=sgd, config=config)
    found = {name: (safe_get_full_fp32_param(p), p.detach()) for name, p in model.named_parameters()}
    wrong = [name for name, (got, expected) in found.items() if not torch.equal(got, expected)]
    if rank == 0:
        print(f"round_robin_gradients {in_turn}: copies of other parameters: {wrong}", flush=True)
dist.destroy_process_group()
