"""What a caller may choose: dtypes, offload, and where one parameter is sharded. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard


class DTypes(Protocol):
    """The fields read of a mixed-precision policy: torch's own policy has them too and may be passed."""

    @property
    def param_dtype(self) -> torch.dtype | None:
        """Of gathered parameters."""
        ...

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """Of gradients on the wire."""
        ...

    @property
    def output_dtype(self) -> torch.dtype | None:
        """Of outputs."""
        ...

    @property
    def cast_forward_inputs(self) -> bool:
        """Whether inputs are cast."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecisionPolicy:
    """The dtypes of one unit; the shards and the optimizer keep the parameters' own.

    ``param_dtype``: of gathered parameters, and so of compute and of the gather on the wire.
    ``reduce_dtype``: in which gradients are accumulated locally and cross between ranks; None means that of
    the gathered parameters. ``output_dtype``: to which floating-point outputs of forward are cast.
    ``cast_forward_inputs``: whether floating-point inputs are cast to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPolicy:
    """Keep shards, gradients and optimizer state on the compute device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep shards, gradients and optimizer state in host memory, pinned where an accelerator can use that."""

    pin_memory: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlacementResult:
    """What ``shard_placement_fn`` may return to put one parameter on a data-parallel mesh of its own.

    Parameters of one call that lie on different meshes form one communication group per mesh.
    """

    placement: Shard | None = None
    mesh: DeviceMesh | None = None
