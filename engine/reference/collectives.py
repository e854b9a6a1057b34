"""The two collectives of a group as objects, so that a caller may put others in their place."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

__all__ = ["AllGather", "DefaultAllGather", "DefaultReduceScatter", "ReduceScatter"]

# torch 2.13 gave the flat collectives new names and deprecated these, which older releases have alone.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class AllGather(Protocol):
    """Gathers equal 1-D shards into one 1-D tensor, in rank order."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Give the output buffer of ``size`` elements."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather; None means that the current stream may read the output."""


class ReduceScatter(Protocol):
    """Reduces a 1-D tensor of equal parts; every rank keeps its own part."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Give an input or output buffer of ``size`` elements."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,  # torch types reduce ops as two unrelated classes
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce and scatter; None means that the current stream may read the output."""


class _Allocates:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class DefaultAllGather(_Allocates):
    """torch's all-gather of one tensor."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather with the process group's own implementation."""
        work: dist.Work | None = _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class DefaultReduceScatter(_Allocates):
    """torch's reduce-scatter of one tensor."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce and scatter with the process group's own implementation."""
        work: dist.Work | None = _reduce_scatter(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )
        return work
