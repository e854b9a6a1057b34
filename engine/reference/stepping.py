"""Hearing of optimizer steps: whole parameters that a group still has are not those of the shards afterwards.

Versions of tensors do not tell: optimizers that loop over tensors in C++ do not count there, and each rank would
decide alone about a gather, which is collective. The hook keeps no state; it reads marks on the parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from engine.reference.parameter import WRITE_MARK, WriteMark

__all__: list[str] = []


def _tell_groups(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            mark = getattr(parameter, WRITE_MARK, None)
            if isinstance(mark, WriteMark):
                mark.tell()


register_optimizer_step_post_hook(_tell_groups)
