"""fairscale's OSS empties the state that it is given to load. Needs torch and fairscale.

fairscale/optim/oss.py, load_state_dict, line 459: what another rank owns is replaced by an empty dict in the caller's
own state, which can then be neither saved nor loaded again.
Run: torchrun --nproc-per-node 2 fairscale_loaded_state.py
"""

import torch
import torch.distributed as dist
from fairscale.optim.oss import OSS
from torch import nn

# Load on two ranks what the first has gathered, and look at it again.
dist.init_process_group("gloo")
rank = dist.get_rank()
parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
optimizer = OSS(parameters, optim=torch.optim.SGD, lr=0.1, momentum=0.9)
for parameter in parameters:
    parameter.grad = torch.ones(2)
optimizer.step()
optimizer.consolidate_state_dict(recipient_rank=0)
given = [optimizer.state_dict() if rank == 0 else None]
dist.broadcast_object_list(given, src=0)
(state,) = given
before = {number: sorted(of_one) for number, of_one in state["state"].items()}
optimizer.load_state_dict(state)
after = {number: sorted(of_one) for number, of_one in state["state"].items()}
print(f"rank {rank}: keys of the state before {before}, after {after}", flush=True)
