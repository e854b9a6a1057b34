"""Megatron-FSDP keeps parameters that are in no unit gathered between steps. Needs torch and megatron-fsdp.

megatron_fsdp/param_and_grad_buffer.py, AllGatherPipeline.reset: buckets of no unit are marked PRESERVED, not freed. A
model whose root has parameters beside its units cannot shard them: if the root is a unit, it is the only one.
Run: torchrun --nproc-per-node 2 megatron_fsdp_parameters_of_no_unit.py
"""

import os
from contextlib import nullcontext
from unittest.mock import MagicMock

import megatron_fsdp
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


class Shifted(nn.Module):
    """A layer, which is a unit, and a shift of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(1000, 1000, bias=False), nn.Parameter(torch.zeros(1000, 1000))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows) + rows @ self.shift


dist.init_process_group()
rank = dist.get_rank()
# Take a step, on the CPU or, where there are two of them, on GPUs; count what was gathered and not freed.
device = torch.device("cuda", rank) if torch.cuda.device_count() > 1 else torch.device("cpu")
if device.type == "cpu":  # it asks for streams and properties of a GPU wherever it is
    torch.cuda.current_device = lambda: 0
    torch.cuda.Stream = torch.cuda.current_stream = MagicMock()
    torch.cuda.stream, torch.Tensor.cuda = lambda _: nullcontext(), lambda tensor, *_: tensor
    for name in ("_lazy_init", "empty_cache", "synchronize", "set_device"):
        setattr(torch.cuda, name, lambda *_: None)
else:
    torch.cuda.set_device(device)
model = megatron_fsdp.fully_shard_model(
    Shifted().to(device), dp_shard_dim="fsdp", tp_dim="tp", fsdp_unit_modules=[nn.Linear], device=device,
    device_mesh=init_device_mesh(device.type, (2, 1), mesh_dim_names=("fsdp", "tp")),
    calculate_per_token_loss=True, preproc_state_dict_for_dcp_ckpt=False,
)  # fmt: skip
model(torch.rand(4, 1000, device=device)).sum().backward()
buffers = model.param_and_grad_buffer
for group, parameters in enumerate(buffers.parameter_groups):
    bucket = parameters.model_weight_buffer.temporary_bucket_allocator.buckets.get(group)
    held = bucket.data.untyped_storage().nbytes() if bucket else 0
    names = [buffers.param_to_name[p] for p in parameters.params]
    print(f"rank {rank}: of the gathered {names} it keeps {held} bytes")
os._exit(0)
