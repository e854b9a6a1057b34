"""An engine whose module changes torch when it is imported; see test_judging.py."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine


# Any: the arguments that torch passes to such a hook.
def _halve_the_first_row(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.dim() > 1:
                parameter.grad[0].mul_(0.5)


register_optimizer_step_pre_hook(_halve_the_first_row)


class PatchesTorch(DistributedDataParallelEngine):
    """Honest but for the change that its import made."""
