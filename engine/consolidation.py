"""The whole state of an optimizer that gathers it on one rank at a time, as ZeRO-1 of torch and of fairscale does."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["consolidated_state"]


# Any: fairscale's optimizer is no class of torch's; a state is nested dicts and lists.
def consolidated_state(optimizer: Any, group: dist.ProcessGroup) -> dict[str, Any]:
    """Gather the state on each rank in turn: a rank has to read it before the next one gathers."""
    whole: dict[str, Any] = {}
    for rank in range(group.size()):
        optimizer.consolidate_state_dict(rank)
        if rank == group.rank():
            whole = optimizer.state_dict()
    return whole
