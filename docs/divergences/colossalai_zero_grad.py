"""ColossalAI's LowLevelZeroOptimizer stops parameters that coast on momentum. Needs torch and colossalai.

colossalai/zero/low_level/low_level_optim.py, zero_grad: zero_grad_stores() drops gradients whatever set_to_none says
"""

import tempfile
from contextlib import nullcontext

import torch
import torch.distributed as dist
from colossalai.accelerator.cpu_accelerator import CpuAccelerator
from colossalai.zero import LowLevelZeroOptimizer

# It refuses a CPU, whose accelerator has no streams.
LowLevelZeroOptimizer._sanity_checks = lambda self: None
CpuAccelerator.current_stream = CpuAccelerator.Stream = lambda self, *_, **__: None
CpuAccelerator.stream = lambda self, stream: nullcontext()
CpuAccelerator.get_current_device = lambda self: torch.device("cpu")


def moved(stage: int) -> float:
    """Train two parameters, then one, with zero_grad(set_to_none=False) between, and see how far the other moves."""
    p, q = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = torch.optim.SGD([p, q], lr=1.0, momentum=0.5)
    if stage:
        optimizer = LowLevelZeroOptimizer(
            optimizer, initial_scale=1, partition_grad=stage == 2, dp_process_group=dist.group.WORLD
        )
    for loss in (lambda: (p + q).sum(), lambda: p.sum()):
        before = q.detach().clone()
        (optimizer.backward if stage else torch.Tensor.backward)(loss())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return (before - q.detach())[0].item()


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
    print(
        "a parameter of gradient zero moves, by momentum:",
        {f"stage {s}" if s else "torch": moved(s) for s in range(3)},
    )
    dist.destroy_process_group()
