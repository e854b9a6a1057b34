"""The interface of ``fully_shard`` and ``replicate``, as one engine implements it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh


# Any: engines with this interface share no base class.
@dataclass(frozen=True, slots=True, kw_only=True)
class ComposableApi:
    """The public names of one engine; ``set_divide_factor`` takes a module, the factor and the number of shards."""

    fully_shard: Callable[..., Any]
    replicate: Callable[..., Any]
    sharded_module: type[Any]
    mixed_precision: Callable[..., Any]
    cpu_offload: Callable[..., Any]
    register_forward_method: Callable[..., None]
    share_comm_ctx: Callable[..., None]
    set_divide_factor: Callable[[Any, float, int], None]
    # Returns the result of shard_placement_fn for a parameter with a mesh of its own.
    placed_on: Callable[[DeviceMesh], Any]
