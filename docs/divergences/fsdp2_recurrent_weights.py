"""A layer that moves its weights in forward, as nn.LSTM does on a GPU, computes with the first ones. Needs torch alone.

torch/nn/modules/rnn.py, flatten_parameters; torch/distributed/fsdp/_fully_shard/_fsdp_param.py, init_unsharded_param
Run: python fsdp2_recurrent_weights.py; without a GPU the LSTM moves nothing.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Moving(nn.Linear):
    """A layer that moves its weight in the first forward, as `nn.RNNBase.flatten_parameters` does."""

    met: nn.Parameter | None = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.met is not self.weight:
            self.weight.data = self.weight.detach().clone()
            object.__setattr__(self, "met", self.weight)
        return super().forward(rows)


def losses(model: nn.Module, rows: torch.Tensor) -> list[float]:
    """Train four steps by plain SGD."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(4):
        output = model(rows)
        loss = (output[0] if isinstance(output, tuple) else output).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(round(loss.item(), 6))
    return found


def main() -> None:
    """Compare the losses of a layer with those of its sharded copy, on one rank."""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    store = dist.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
    dist.init_process_group("nccl" if has_gpu else "gloo", store=store, rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (1,))
    for made in (lambda: Moving(8, 8), lambda: nn.LSTM(8, 8)):
        torch.manual_seed(0)
        plain, rows = made().to(device), torch.randn(5, 4, 8, device=device)
        torch.manual_seed(0)
        sharded = made().to(device)
        fully_shard(sharded, mesh=mesh)
        name = type(plain).__name__
        print(f"{name} alone:   {losses(plain, rows)}\n{name} sharded: {losses(sharded, rows)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
