"""DeepSpeed ZeRO-3 steps with the last gradient of a parameter that has none now. Needs torch and deepspeed.

deepspeed/runtime/zero/stage3.py, independent_gradient_partition_epilogue: takes __param_id_to_grad_partition of every
parameter, a buffer that only a backward which reaches the parameter writes, and that nothing clears
Run: DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 deepspeed_zero3_gradient_again.py
"""

import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn


class Two(nn.Module):
    """Two layers, of which forward may leave the second out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, uses_both: bool) -> torch.Tensor:
        return self.first(x) + self.second(x) if uses_both else self.first(x)


# Take one step with both layers, and one with the first alone.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else it compiles for a minute
dist.init_process_group("gloo")
rank = dist.get_rank()
model = Two()
config = {
    "train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}  # fmt: skip
sgd = torch.optim.SGD(model.parameters(), lr=1.0)
engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=config)
for uses_both in (True, False):
    before = safe_get_full_fp32_param(model.second.weight).clone()
    engine.backward(engine(torch.ones(1, 4), uses_both).sum())
    engine.step()
    moved = (before - safe_get_full_fp32_param(model.second.weight)).max().item()
    if rank == 0:
        print(f"second layer used: {uses_both}; its weight moved by {moved:.3f}", flush=True)
dist.barrier()
dist.destroy_process_group()
