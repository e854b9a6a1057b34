"""ZeroRedundancyOptimizer.load_state_dict takes other ranks' state out of the caller's dict. Needs torch alone.

torch/distributed/optim/zero_redundancy_optimizer.py, load_state_dict: state_dict["state"][key] = None
Run: torchrun --nproc-per-node 2 zero_redundancy_load_state_dict.py
"""

import warnings

import torch
import torch.distributed as dist
from torch import nn

warnings.simplefilter("ignore")
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402


def num_states(state: dict) -> int:
    """Count the parameters that have a momentum in the dict."""
    return sum(bool(found) for found in state["state"].values())


# Make a whole state on rank 0, load it there, and look at it again.
dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, momentum=0.9)
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
optimizer.consolidate_state_dict(to=0)
if rank == 0:
    state = optimizer.state_dict()
    before = num_states(state)
    optimizer.load_state_dict(state)
    print(f"parameters with a state in the dict: {before} before it was loaded, {num_states(state)} after")
dist.barrier()
dist.destroy_process_group()
