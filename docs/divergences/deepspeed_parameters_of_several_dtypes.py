"""DeepSpeed ZeRO-1 gives parameters of one group one dtype, and bfloat16 gradients another. Needs torch and deepspeed.

deepspeed/runtime/zero/stage_1_and_2.py, __init__: the parameters of a group are joined by torch.cat,
which promotes, and _update_model_bit16_weights makes them views of that; get_lp_grad_fragment is of the float32 copy
"""

import os
import sys

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1},
}


def prepared(*dtypes: torch.dtype) -> nn.Module:
    """Pass two layers to DeepSpeed, which is asked for no dtype."""
    layers = nn.Sequential(*(nn.Linear(4, 4, bias=False, dtype=dtype) for dtype in dtypes))
    engine, *_ = deepspeed.initialize(
        model=layers, optimizer=torch.optim.SGD(layers.parameters(), lr=0.1), config=CONFIG
    )
    return engine


if __name__ == "__main__":
    os.environ |= {"LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"}
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else it compiles for a minute
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mixed = prepared(torch.float32, torch.bfloat16).module
    print("parameters of float32 and bfloat16 are now of", [p.dtype for p in mixed.parameters()])
    engine = prepared(torch.bfloat16, torch.bfloat16)
    engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
    first = next(engine.module.parameters())
    gradient = first._hp_mapping.get_lp_grad_fragment(first._index_in_param_group)
    print(f"a parameter of {first.dtype} has a reduced gradient of {gradient.dtype}")
    dist.destroy_process_group()
