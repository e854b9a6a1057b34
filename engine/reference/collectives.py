"""The two collectives of a group, the division of gradients, and the reduction of a group's gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardproof.engine.reference.autograd_hooks import without_autograd
from shardproof.engine.reference.comm_context import PendingCollective, Reduction
from shardproof.engine.reference.mesh import Ranks
from shardproof.engine.reference.param_layout import Allocate, ParamLayout, UnshardedMemory
from shardproof.engine.reference.parameter import FSDPParam
from shardproof.engine.reference.torch_private import allocated_by

# torch 2.13 renamed the flat collectives and deprecated these names (pytorch#186123); older releases have only these.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class AllGather(Protocol):
    """Gathers equal 1-D shards into one 1-D tensor, in rank order."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the output buffer of ``size`` elements."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather; None means that the current stream can read the output."""


class ReduceScatter(Protocol):
    """Reduces a 1-D tensor of equal parts; each rank keeps its part."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an input or output buffer of ``size`` elements."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,  # torch has two unrelated classes of reduce ops
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce and scatter; None means that the current stream can read the output."""


class _Allocates:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class DefaultAllGather(_Allocates):
    """torch's all-gather for one tensor."""

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
    """torch's reduce-scatter for one tensor."""

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


class _AllocatesInGroup:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        numel = size if isinstance(size, int) else math.prod(size)
        return allocated_by(self._group, numel, dtype, device)


class GroupAllGather(_AllocatesInGroup):
    """The default one, with buffers that the process group allocates."""

    __call__ = DefaultAllGather.__call__


class GroupReduceScatter(_AllocatesInGroup):
    """The default one, with buffers that the process group allocates."""

    __call__ = DefaultReduceScatter.__call__


@dataclass(frozen=True, slots=True, eq=False)
class PendingAllGather:
    """A gather in flight. Without ``work`` there is nothing to wait for.

    ``kept_shard`` is the source of its input copy: memory of another stream, which must not be freed before the gather
    ends.
    """

    output: torch.Tensor
    work: dist.Work | None
    kept_shard: torch.Tensor | None = None


def foreach_all_gather(
    layout: ParamLayout,
    output: torch.Tensor,
    group: dist.ProcessGroup,
    all_gather: AllGather,
    kept_shard: torch.Tensor | None,
) -> PendingAllGather:
    """Fill this rank's part of ``output`` with its shards, or the part kept from an earlier gather; gather the rest."""
    source = output.chunk(group.size())[group.rank()] if output.numel() else output
    if kept_shard is None:
        layout.copy_in(source)
    else:
        source.copy_(kept_shard)
    work = None
    if source.numel():
        work = all_gather(output_tensor=output, input_tensor=source, group=group, async_op=True)
    return PendingAllGather(output, work, kept_shard)


def copy_own_shards(layout: ParamLayout, memory: UnshardedMemory, device: torch.device) -> PendingAllGather:
    """Copy the shards in place of a gather over one rank; does nothing if they are the whole parameters themselves."""
    if memory.is_shared:
        return PendingAllGather(torch.empty(0), None)
    output = memory.direct()
    if output is None:
        output = torch.empty(memory.wire_numel, dtype=memory.wire_dtype, device=device)
    layout.copy_in(output)
    return PendingAllGather(output, None)


# The exponent suffices for a sum over any number of ranks; other dtypes are scaled down before the sum.
_WIDE_RANGE = frozenset({torch.float32, torch.bfloat16})


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Divide by ``before``, reduce with ``scatter_op`` and then ``reduce_op``, divide by ``after``."""

    before: float = 1.0
    after: float = 1.0
    scatter_op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    reduce_op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM

    @property
    def total(self) -> float:
        """The divisor applied outside the reduce ops."""
        return self.before * self.after


def division(
    *, dtype: torch.dtype, shard_size: int, replicate_size: int, factor: float | None, only_sums: bool
) -> Division:
    """Choose the division that turns a sum over all ranks into sum / factor (default: the mean).

    The reduction divides once, whichever of the two collectives exist: a shard group of one rank has no
    reduce-scatter, but the factor still applies. The mean uses AVG; another factor divides the small reduced tensor
    afterwards.
    """
    ranks = shard_size * replicate_size
    if ranks == 1 and factor is None:
        return Division()
    if dtype not in _WIDE_RANGE:
        return _split(float(ranks) if factor is None else factor)
    if only_sums:
        return Division(after=float(ranks) if factor is None else factor)
    if factor is None:
        return Division(scatter_op=dist.ReduceOp.AVG, reduce_op=dist.ReduceOp.AVG)
    if factor == shard_size and shard_size > 1:
        return Division(scatter_op=dist.ReduceOp.AVG)
    return Division(after=factor)


def _split(factor: float) -> Division:
    """Divide by about the square root before the sum and by the rest after it, to avoid overflow and underflow.

    ``before`` is a power of two, so that dividing by it is exact.
    """
    before = 1.0
    while factor % before == 0 and factor / before > before:
        before *= 2
    return Division(before=before, after=factor / before)


CommHook = Callable[..., Any]
"""Reduces in place of the engine: ``hook(gradients, row)`` with shards, else ``hook(gradients)``."""


class PartialReduction:
    """Gradients that were reduce-scattered but not yet all-reduced over replicas: 1-D padded shards.

    They are summed over microbatches in the wider of the reduce dtype and the parameter's dtype, as sharded gradients
    are without replicas: a sum in bfloat16 would lose small microbatches. The sum is rounded to the reduce dtype once,
    for the all-reduce. FSDP2 sums in the reduce dtype.
    """

    def __init__(self, layout: ParamLayout) -> None:
        self._layout = layout
        self._expected: set[FSDPParam] = set()
        self.dtypes: set[torch.dtype] = set()
        """The reduce dtype of the gradients that are here, or in flight."""
        self._sums: dict[FSDPParam, torch.Tensor] = {}

    def __contains__(self, parameter: FSDPParam) -> bool:
        """Whether part of a gradient of ``parameter`` is here, or in flight."""
        return parameter in self._expected

    def __bool__(self) -> bool:
        """Whether any gradient is here, or in flight."""
        return bool(self._expected)

    def expect(self, parameters: Sequence[FSDPParam], plan: ReductionPlan) -> None:
        """Record, when a reduction is issued, whether it will add partial sums or consume them all."""
        if plan.all_reduces:
            self._expected.difference_update(parameters)
        else:
            self._expected.update(parameters)
            self.dtypes.add(plan.dtype)
        if not self._expected:
            self.dtypes.clear()

    def add(self, parameters: Sequence[FSDPParam], reduced: torch.Tensor) -> None:
        """Add the parameters' parts of ``reduced`` to the partial sums."""
        for parameter, part in self._layout.parts(parameters, reduced):
            earlier = self._sums.get(parameter)
            if earlier is None or torch.promote_types(earlier.dtype, part.dtype) != earlier.dtype:
                wide = part.to(torch.promote_types(part.dtype, parameter.local.dtype))
                self._sums[parameter] = wide if earlier is None else wide.add_(earlier)
            else:
                earlier.add_(part)

    def move_to(self, parameters: Sequence[FSDPParam], reduced: torch.Tensor) -> None:
        """Add the partial sums to the parameters' parts of ``reduced``, and drop them."""
        for parameter, part in self._layout.parts(parameters, reduced):
            earlier = self._sums.pop(parameter, None)
            if earlier is not None:
                part.add_(earlier)  # computed in the wider dtype, rounded once

    def clear(self) -> None:
        self._sums.clear()
        self._expected.clear()
        self.dtypes.clear()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReductionPlan:
    """The options of one reduction of a group.

    ``dtype`` is the dtype in communication; ``final_dtype`` and ``home`` are the gradients' final dtype and device.
    """

    layout: ParamLayout
    mesh: Ranks
    division: Division
    dtype: torch.dtype
    final_dtype: torch.dtype
    home: torch.device
    scatter: ReduceScatter
    scatter_group: dist.ProcessGroup | None
    all_reduces: bool
    hook: Callable[[torch.Tensor], None] | None
    comm_hook: CommHook | None
    partial: PartialReduction

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank to communicate with, and no other work."""
        is_lone = self.mesh.shard_size * self.mesh.replicate_size == 1
        return is_lone and self.hook is None and self.comm_hook is None and self.layout.keeps_apart


def foreach_reduce(parameters: Sequence[FSDPParam], flat: torch.Tensor, plan: ReductionPlan) -> Reduction:
    """Reduce gradients that were copied into ``flat`` into the sharded parameters' gradients.

    Yields each collective that must end before the next step; runs without autograd.
    """
    if plan.comm_hook is not None:
        _write_gradients(_reduced_by_hook(flat, plan.comm_hook, plan), parameters, plan)
        return
    reduced = flat
    if plan.mesh.shard_size > 1 and flat.numel():
        reduced = _scatter_output(flat, plan)
        assert plan.scatter_group is not None
        work = plan.scatter(
            output_tensor=reduced,
            input_tensor=flat,
            group=plan.scatter_group,
            op=plan.division.scatter_op,
            async_op=True,
        )
        if work is not None:
            yield PendingCollective(work, reduced)
    del flat
    if plan.mesh.is_replicated:
        with without_autograd():
            if not plan.all_reduces:
                plan.partial.add(parameters, reduced)
                return
            plan.partial.move_to(parameters, reduced)
    if plan.mesh.replicate_size > 1 and reduced.numel():
        work = dist.all_reduce(
            reduced, op=plan.division.reduce_op, group=plan.mesh.replicate_group, async_op=True
        )
        if work is not None:
            yield PendingCollective(work, reduced)
    with without_autograd():
        if plan.hook is not None:
            plan.hook(reduced)
        if plan.division.after != 1:
            reduced.div_(plan.division.after)
        _write_gradients(reduced, parameters, plan)


def reduce_alone(parameters: Sequence[FSDPParam], gradients: list[torch.Tensor], plan: ReductionPlan) -> None:
    """Use whole gradients as the reduced ones on a single rank, rounded as in communication."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        own = gradient.to(plan.dtype)
        if plan.division.total != 1:
            own = own / plan.division.total
        _write_gradients(own.reshape(-1), (parameter,), plan)


def reduce_scatter_copy_in(
    parameters: Sequence[FSDPParam], gradients: list[torch.Tensor], plan: ReductionPlan, allocate: Allocate
) -> torch.Tensor:
    """Copy whole gradients rank by rank into memory (1-D) from ``allocate``; empties the list."""
    flat = plan.layout.copy_in_gradients(parameters, gradients, allocate)
    if plan.division.before != 1:
        flat.div_(plan.division.before)
    return flat


def _scatter_output(flat: torch.Tensor, plan: ReductionPlan) -> torch.Tensor:
    """Return memory for this rank's row of the sum."""
    size = (flat.numel() // plan.mesh.shard_size,)
    return plan.scatter.allocate(size, dtype=flat.dtype, device=flat.device)


def _reduced_by_hook(flat: torch.Tensor, hook: CommHook, plan: ReductionPlan) -> torch.Tensor:
    """Reduce by the caller's hook, divisions included."""
    with torch.no_grad():
        if plan.mesh.shard_size == 1:
            hook(flat)
            return flat
        row = _scatter_output(flat, plan)
        hook(flat, row)
        return row


def _write_gradients(reduced: torch.Tensor, parameters: Sequence[FSDPParam], plan: ReductionPlan) -> None:
    """Write the reduced row to the gradients, as views where dtype and device allow."""
    plan.layout.write_gradients(parameters, reduced.to(device=plan.home, dtype=plan.final_dtype))
