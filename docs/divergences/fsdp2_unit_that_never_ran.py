"""A unit that no forward entered yet has no gradient to cast: AttributeError in backward. Needs torch alone.

torch/distributed/fsdp/_fully_shard/_fsdp_param.py, to_accumulated_grad_if_needed: self._unsharded_param
Run: torchrun --nproc-per-node 2 fsdp2_unit_that_never_ran.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Model(nn.Module):
    """A layer for all microbatches, and one for the last."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.late = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor, *, is_last: bool) -> torch.Tensor:
        """Run the late layer where asked to."""
        rows = self.always(rows)
        return self.late(rows) if is_last else rows


# Hold the first microbatch back, and reduce in float64.
dist.init_process_group("gloo")
model, mesh = Model(), dist.init_device_mesh("cpu", (2,))
for module in (model.always, model.late, model):
    fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64))
for is_last in (False, True):
    model.set_requires_gradient_sync(is_last)
    model(torch.ones(1, 4), is_last=is_last).sum().backward()
dist.destroy_process_group()
