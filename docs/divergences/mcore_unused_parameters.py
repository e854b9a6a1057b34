"""Megatron Core's DistributedDataParallel moves parameters that no loss reached. Needs torch and megatron-core.

megatron/core/optimizer/optimizer.py, FP32Optimizer.prepare_grads: gradients are those of main_grad, which are
zeros after zero_grad_buffer and never None, so the optimizer decays weights and applies momentum where torch's DDP
leaves a parameter alone.
"""

import tempfile

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import nn


class HalfUsed(nn.Module):
    """Two layers, of which the loss needs one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.used(rows)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: torch.device("cpu")  # where buffers are made
    dist.init_process_group("gloo", store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
    group = dist.group.WORLD
    groups = ProcessGroupCollection(dp=group, tp=group, pp=group, ep=group, cp=group, expt_dp=group)
    model = HalfUsed().to(torch.cuda.current_device())
    config = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model, pg_collection=groups)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    before = model.unused.weight.detach().clone()
    wrapped.zero_grad_buffer()
    wrapped(torch.rand(4, 2, device=before.device)).sum().backward()
    wrapped.finish_grad_sync()
    for parameter in model.parameters():
        parameter.grad = parameter.main_grad  # as FP32Optimizer.prepare_grads does
    optimizer.step()
    print("the unused layer moves by", (model.unused.weight - before).abs().max().item())
