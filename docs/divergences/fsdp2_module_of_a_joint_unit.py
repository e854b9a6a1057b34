"""The second module of a unit runs once more without gradients before its turn: backward raises. Needs torch alone.

torch/distributed/fsdp/_fully_shard/_fsdp_state.py, _register_group_forward_hooks: modules_to_run
Run: torchrun --nproc-per-node 2 fsdp2_module_of_a_joint_unit.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Model(nn.Module):
    """An entry and two layers; the last is also asked without gradients, before its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.first, self.second = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Add what the second layer makes without gradients."""
        rows = torch.tanh(self.first(self.entry(rows)))
        with torch.no_grad():
            still = self.second(rows)
        return self.second(rows) + still


# Train two steps.
dist.init_process_group("gloo")
model, mesh = Model(), dist.init_device_mesh("cpu", (2,))
fully_shard([model.first, model.second], mesh=mesh)
fully_shard(model, mesh=mesh)
for _ in range(2):
    model(torch.ones(1, 4)).sum().backward()
dist.destroy_process_group()
