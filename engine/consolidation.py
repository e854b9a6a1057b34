"""Gathers the state of optimizers that consolidate it on one rank at a time, as torch's and fairscale's ZeRO-1 do."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["consolidated_state"]


# Any: fairscale's optimizer does not derive from torch's; a state is nested dicts and lists.
def consolidated_state(optimizer: Any, group: dist.ProcessGroup) -> dict[str, Any]:
    """Gather the state on each rank in turn; each rank reads it before the next one gathers."""
    whole: dict[str, Any] = {}
    for rank in range(group.size()):
        optimizer.consolidate_state_dict(rank)
        if rank == group.rank():
            whole = optimizer.state_dict()
    return whole
