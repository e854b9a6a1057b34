"""Parameters that only some microbatches use, while FSDP2 holds back the reduction across replicas. Needs torch alone.

torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, post_backward
Run: torchrun --nproc-per-node 2 fsdp2_replicas_held_back.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor


class Branches(nn.Module):
    """Two layers, of which each forward calls one, and one that each forward calls."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, width, bias=False)])
        self.last = nn.Linear(4, 4, bias=False)

    def forward(self, rows: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](self.last(rows))


def step(model: Branches) -> list[torch.Tensor | None]:
    """Take two microbatches, one through each branch; return the gradients of the branches."""
    for branch in range(2):
        if isinstance(model, FSDPModule):
            model.set_requires_all_reduce(branch == 1)
        model(torch.full((2, 4), float(branch + 1)), branch).sum().backward()
    gradients = [branch.weight.grad for branch in model.branches]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]


def told(model: Branches, expected: list[torch.Tensor | None]) -> str:
    """Compare the gradients of one step with those of a model that is not sharded."""
    try:
        found = step(model)
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    wrong = [
        f"that of branch {i} is {'None' if f is None else 'wrong'}"
        for i, (f, e) in enumerate(zip(found, expected, strict=True))
        if f is None or e is None or not torch.allclose(f, e)
    ]
    return ", ".join(wrong) or "all gradients are right"


def main() -> None:
    """Shard branches of equal and of different sizes in one unit, and as units of their own."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for width, has_units in ((4, False), (6, False), (4, True)):
        model = Branches(width)
        for branch in model.branches if has_units else ():
            fully_shard(branch, mesh=mesh)
        fully_shard(model, mesh=mesh)
        result = told(model, step(Branches(width)))
        if dist.get_rank() == 0:
            where = "units of their own" if has_units else f"one unit, the second of {width} rows"
            print(f"branches in {where}: {result}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
