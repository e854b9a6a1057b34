"""SimpleFSDP unties parameters that modules share, and makes frozen ones trainable. Needs torch and torchtitan.

torchtitan/experiments/graph_trainer/simple_fsdp.py, data_parallel: each module registers an nn.Parameter of its own
"""

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel


class Tied(nn.Module):
    """Two layers with one weight, and a third that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.second.weight = self.first.weight
        self.third.weight.requires_grad_(False)


def show(when: str, model: Tied) -> None:
    """Print what holds."""
    is_tied = model.first._parameters["weight"] is model.second._parameters["weight"]
    print(
        f"{when}: tied {is_tied}, names {[name for name, _ in model.named_parameters()]}, "
        f"third is trained {model.third._parameters['weight'].requires_grad}"
    )


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = Tied()
    show("before", model)
    data_parallel(model, init_device_mesh("cpu", (1,)), mode="fully_shard")
    show("after ", model)
    dist.destroy_process_group()
