"""Options for callers beyond torch's own policies: the mesh of one parameter and its dtypes. Values only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard


@dataclass(frozen=True)
class MixedPrecisionPolicy(torch_fsdp.MixedPrecisionPolicy):
    """torch's policy with its field since 2.15 (pytorch#196576): a function that chooses how one parameter computes.

    Called once for each parameter of a call; it returns the parameter's own dtype, ``param_dtype``, or None for the
    latter.
    """

    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(
        default=None, kw_only=True
    )


class DTypes(Protocol):
    """The fields of torch's ``MixedPrecisionPolicy`` that a unit reads.

    The shards and the optimizer keep the parameters' own dtype.
    """

    @property
    def param_dtype(self) -> torch.dtype | None:
        """The dtype of gathered parameters, and so of compute and of the all-gather."""
        ...

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype in which whole gradients are accumulated and reduced between ranks.

        None: the dtype that parameters set for their gradients (``grad_dtype``), by default their own; if they differ
        within a group, the widest.
        """
        ...

    @property
    def output_dtype(self) -> torch.dtype | None:
        """The dtype to which floating-point outputs of forward are cast."""
        ...

    @property
    def cast_forward_inputs(self) -> bool:
        """Whether floating-point inputs are cast to ``param_dtype``."""
        ...


class MeshDims(Protocol):
    """The fields of torch's ``DataParallelMeshDims``: which axes of a mesh of all axes are data-parallel."""

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names of the axes to shard over, as one."""
        ...

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """Names of the axes to replicate over, as one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlacementResult:
    """A result of ``shard_placement_fn`` that puts one parameter on a data-parallel mesh of its own.

    Parameters of one call that are on different meshes form one communication group per mesh.
    """

    placement: Shard | None = None
    mesh: DeviceMesh | None = None
