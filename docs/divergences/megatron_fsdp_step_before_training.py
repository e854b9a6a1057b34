"""Megatron-FSDP takes an optimizer step before training. Needs torch and megatron-fsdp.

megatron_fsdp/fully_shard.py, fully_shard_optimizer: gradients of zeros, then optimizer.step(), to make state
"""

import torch
from megatron_fsdp import fully_shard_optimizer
from torch import nn

if __name__ == "__main__":
    layer = nn.Linear(2, 2, bias=False)
    layer.weight._megatron_fsdp_model = layer  # any model: this one is asked for nothing
    before = layer.weight.detach().clone()
    adamw = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.5)
    fully_shard_optimizer(adamw, preproc_state_dict_for_dcp_ckpt=False)
    decayed = (layer.weight / before).mean().item()
    print(f"before the first step weights are {decayed:.2f} of what they were, and AdamW counts", end=" ")
    print([int(state["step"]) for state in adamw.state.values()], "steps")
