"""Megatron-FSDP refuses a parameter of no dim on some ranks alone. Needs torch and megatron-fsdp.

megatron_fsdp/param_and_grad_buffer.py, make_fsdp_dtensor: the DTensor of a scalar is given the shape of this rank's
piece, and only ranks that hold nothing of it find, in validate_uneven_dtensor, that it does not fit.
Run: torchrun --nproc-per-node 2 megatron_fsdp_scalars.py
"""

import os

import megatron_fsdp
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


class Gained(nn.Module):
    """A layer and a gain of no dim."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gain = nn.Linear(4, 4), nn.Parameter(torch.tensor(0.5))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows) * self.gain


dist.init_process_group()
rank = dist.get_rank()
# Shard it, on the CPU or, where there are two of them, on GPUs.
device = torch.device("cuda", rank) if torch.cuda.device_count() > 1 else torch.device("cpu")
if device.type == "cpu":  # it asks for streams and properties of a GPU wherever it is
    torch.cuda.current_device = lambda: 0
    for name in ("Stream", "current_stream"):
        setattr(torch.cuda, name, lambda *_: torch.cpu.current_stream())
    for name in ("_lazy_init", "empty_cache", "synchronize", "set_device"):
        setattr(torch.cuda, name, lambda *_: None)
else:
    torch.cuda.set_device(device)
mesh = init_device_mesh(device.type, (2, 1), mesh_dim_names=("fsdp", "tp"))
try:
    megatron_fsdp.fully_shard_model(
        Gained().to(device), device_mesh=mesh, dp_shard_dim="fsdp", tp_dim="tp",
        fsdp_unit_modules=[nn.Linear], device=device, calculate_per_token_loss=True,
    )  # fmt: skip
    print(f"rank {rank}: went ahead", flush=True)
except (AssertionError, RuntimeError) as error:
    print(f"rank {rank}: {error}", flush=True)
os._exit(0)
