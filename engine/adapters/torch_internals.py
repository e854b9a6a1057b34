"""The private names of torch that the adapters import, with the effect of a release that lacks each.

Each is imported where it is used, so that an engine without one of them can still be tested on the rest. Adapters
also read private attributes of their engine's objects, without importing a name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from shardproof.engine.import_by_name import EngineUnavailableError

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
"""Major and minor version of this torch; some capabilities of its engines depend on it."""


def torch_replicate() -> Callable[..., Any]:  # Any: a module of a class that torch makes
    """Return the `replicate` that is built on FSDP2, which has no public name.

    Without it, FSDP2 has no replicated layout and there is no engine torch.replicate; raises EngineUnavailableError.
    """
    try:
        from torch.distributed._composable.replicate_with_fsdp import replicate as found
    except ImportError as error:
        raise EngineUnavailableError(
            f"needs torch.distributed._composable.replicate_with_fsdp, which torch {torch.__version__} does not have"
        ) from error
    return found


def optimizer_in_backward(
    optimizer: type[torch.optim.Optimizer], parameters: Iterable[nn.Parameter], options: dict[str, Any]
) -> None:
    """Add to each parameter an optimizer that steps in backward, as torch's function without a public name does."""
    # torch leaves the name out of what the module exports.
    from torch.distributed.optim import _apply_optimizer_in_backward  # type: ignore[attr-defined]

    _apply_optimizer_in_backward(optimizer, parameters, options, register_hook=False)


def replicate(module: nn.Module, **options: Any) -> Any:  # Any: as above
    """Call the `replicate` that is built on FSDP2; raises as `torch_replicate` does."""
    return torch_replicate()(module, **options)


def can_place() -> bool:
    """Return whether this release supports a parameter on a mesh of its own within a unit; see `placed_on`."""
    try:
        module = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_common")
    except ImportError:
        return False
    return hasattr(module, "FSDPMeshInfo") and hasattr(module, "ShardPlacementResult")


def has_mesh_dims() -> bool:
    """Return whether this release has `DataParallelMeshDims`, which is public."""
    return hasattr(torch.distributed.fsdp, "DataParallelMeshDims")


def placed_on(mesh: DeviceMesh) -> Any:  # Any: torch does not publish the type
    """Return the result of ``shard_placement_fn`` for a parameter on a mesh of its own.

    Without it, FSDP2 does not support experts.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    return ShardPlacementResult(placement=None, mesh_info=FSDPMeshInfo(mesh=mesh, shard_mesh_dim=0))


def default_comm_hooks() -> ModuleType:
    """Return the module of FSDP1's own communication hooks.

    Without it, the engine torch.fsdp1 lacks the hooks that cases register, and cannot be imported.
    """
    from torch.distributed.algorithms._comm_hooks import default_hooks

    return default_hooks


def hybrid_that_keeps() -> ShardingStrategy:
    """Return FSDP1's strategy that shards within replicas and keeps parameters from forward to backward.

    Without it, the wrappers do not support this layout.
    """
    return ShardingStrategy._HYBRID_SHARD_ZERO2
