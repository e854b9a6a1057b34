"""FSDP2's reset_iter_state drops zeros that zero_grad left: momentum then moves nothing. Needs torch >= 2.15.

torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, _reset_iter_state: every parameter's gradient becomes None
Run: torchrun --nproc-per-node 2 fsdp2_reset_drops_zeros.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


class Model(nn.Module):
    """A layer that each step uses, and one that only the first does."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.first = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor, is_first: bool) -> torch.Tensor:
        """Run the layers of the step; raise where the rows are not finite."""
        if not rows.isfinite().all():
            raise FloatingPointError
        rows = self.always(rows)
        return self.first(rows) if is_first else rows


# Train two steps, without and with a forward that raises before the second.
dist.init_process_group("gloo")
rank = dist.get_rank()
for does_fail in (False, True):
    torch.manual_seed(0)
    model = Model()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        before = model.first.weight.full_tensor()
        if does_fail and step == 1:
            try:
                model(torch.full((1, 4), torch.nan), False)
            except FloatingPointError:
                model.reset_iter_state()
        model(torch.ones(1, 4), step == 0).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    moved = (model.first.weight.full_tensor() - before).abs().max().item()
    print(f"rank {rank}, a forward fails: {does_fail}; momentum moves the unused layer by {moved:.3g}")
dist.destroy_process_group()
