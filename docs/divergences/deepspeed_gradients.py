"""DeepSpeed ZeRO loses, repeats or refuses gradients that torch computes. Needs torch and deepspeed.

deepspeed/runtime/zero/stage_1_and_2.py: each backward ends in the gradients of a step unless the engine was told, by
gradient_accumulation_steps or set_gradient_accumulation_boundary, that more will follow; ZeRO-3 and plain torch add up.
Each reentrant checkpoint has a backward of its own, and a parameter is reduced once.
deepspeed/runtime/zero/stage3.py, independent_gradient_partition_epilogue: takes __param_id_to_grad_partition of every
parameter, a buffer that only a backward which reaches the parameter writes, and that nothing clears.
After a forward in inference mode ZeRO-3 refuses to train on before the next step. It never gathers a parameter without
elements (partitioned_param_coordinator.py, fetch_sub_module: fetch_numel > 0).
Run: DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 deepspeed_gradients.py
"""

import sys
import traceback

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn
from torch.utils.checkpoint import checkpoint


class Two(nn.Module):
    """Two layers: forward leaves the second out, or runs it, or runs it in two checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, rows: torch.Tensor, num_checkpoints: int = 0, uses_both: bool = True) -> torch.Tensor:
        """Run them."""
        hidden = self.first(rows)
        for _ in range(num_checkpoints):
            hidden = checkpoint(self.second, hidden, use_reentrant=True)
        return hidden + self.second(rows) if uses_both and not num_checkpoints else hidden


def wrapped(model: nn.Module, stage: int) -> nn.Module:
    """Return the engine of a model."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=config)
    return engine


def show(text: str) -> None:
    """Print it on the first rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def tried(title: str, act: object) -> None:
    """Show what an act returns or raises, and where."""
    try:
        show(f"{title}: {act()}")
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{last.filename.partition('site-packages/')[2]}:{last.lineno}"
        show(f"{title}: {type(error).__name__}: {str(error)[:80]}, at {place}")


sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else it compiles for a minute
dist.init_process_group("gloo")
for stage in (1, 2, 3):
    layer = nn.Linear(1, 1, bias=False)
    before, engine = layer.weight.item(), wrapped(layer, stage)
    for value in (1.0, 10.0):
        engine.backward(engine(torch.tensor([[value]])).sum())
    engine.step()
    moved = before - float(safe_get_full_fp32_param(layer.weight))
    show(f"ZeRO-{stage}, two backwards: expected a step of 11, got one of {moved:.0f}")
model = Two()
engine = wrapped(model, 3)
for uses_both in (True, False):
    old = safe_get_full_fp32_param(model.second.weight).clone()
    engine.backward(engine(torch.ones(1, 4), uses_both=uses_both).sum())
    engine.step()
    moved = (old - safe_get_full_fp32_param(model.second.weight)).max().item()
    show(f"ZeRO-3, second layer used: {uses_both}; its weight moved by {moved:.3f}")
for stage in (0, 1, 2, 3):
    rows, engine = torch.ones(1, 4, requires_grad=True), wrapped(Two(), stage)
    title = f"ZeRO-{stage}, gradient by inputs"
    tried(title, lambda: torch.autograd.grad(engine(rows).sum(), [rows])[0].tolist())  # noqa: B023 - called at once
for stage in (1, 2, 3):
    engine = wrapped(Two(), stage)
    title = f"ZeRO-{stage}, a layer in two reentrant checkpoints"
    tried(title, lambda: engine.backward(engine(torch.ones(1, 4), num_checkpoints=2).sum()))  # noqa: B023


def evaluated_between() -> float:
    """Evaluate in inference mode between two microbatches."""
    engine, rows = wrapped(Two(), 3), torch.ones(1, 4)
    engine.backward(engine(rows).sum())
    with torch.inference_mode():
        engine(rows)
    loss = engine(rows).sum()
    engine.backward(loss)
    return loss.item()


tried("ZeRO-3, an evaluation in inference mode between two microbatches", evaluated_between)
model = nn.Sequential(nn.Linear(4, 0, bias=False), nn.Linear(0, 4))
tried("ZeRO-3, a weight without elements", lambda: wrapped(model, 3)(torch.ones(1, 4)).sum().item())
