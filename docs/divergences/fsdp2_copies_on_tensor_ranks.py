"""fully_shard adds what tensor-parallel ranks have of a copied parameter's gradient in the dtype of computation.

torch/distributed/fsdp/_fully_shard/_fsdp_param.py, _get_grad_inner_tensor: redistribute() comes before the cast to
MixedPrecisionPolicy.reduce_dtype. Needs torch alone; https://github.com/pytorch/pytorch/issues/190626.
Run: torchrun --nproc-per-node 4 fsdp2_copies_on_tensor_ranks.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


class Gain(nn.Module):
    """Factors that both tensor-parallel ranks have, each for its own rows."""

    def __init__(self, mesh: dist.DeviceMesh) -> None:
        super().__init__()
        self.factors = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Scale the columns."""
        return rows * self.factors


# Compute in bfloat16, in which 256 and 1 have a form and their sum has none, and reduce in float32.
dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
model = Gain(mesh["tensor"])
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
fully_shard(model, mesh=mesh["data"], mp_policy=policy)
part = 1.0 if mesh["tensor"].get_local_rank() else 256.0
rows = DTensor.from_local(torch.full((1, 4), part, dtype=torch.bfloat16), mesh["tensor"], [Shard(0)])
model(rows).to_local().sum().backward()
gradient = model.factors.grad.full_tensor()
if rank == 0:
    print(f"{gradient.dtype}: {gradient.tolist()}, expected 257")
dist.destroy_process_group()
