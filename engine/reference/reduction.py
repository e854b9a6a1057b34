"""One group's gradients on their way from whole to reduced shards, as a generator that stops at each wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from engine.reference.arrangement import Arrangement
from engine.reference.collectives import ReduceScatter
from engine.reference.division import Division
from engine.reference.lanes import InFlight, Reduction
from engine.reference.mesh import Ranks
from engine.reference.parameter import ManagedParameter

__all__ = ["CommHook", "Partial", "ReductionPlan", "cut", "keep", "reduction"]

CommHook = Callable[..., Any]
"""Reduces in place of the engine: ``hook(gradients, row)`` where there are shards, else ``hook(gradients)``."""


class Partial:
    """Gradients that were reduce-scattered but not yet all-reduced over replicas: 1-D padded shards."""

    def __init__(self, arrangement: Arrangement) -> None:
        self._arrangement = arrangement
        self._expected: set[ManagedParameter] = set()
        self._sums: dict[ManagedParameter, torch.Tensor] = {}

    def __contains__(self, parameter: ManagedParameter) -> bool:
        """Whether something of ``parameter`` is here, or on its way."""
        return parameter in self._expected

    def expect(self, parameters: Sequence[ManagedParameter], *, all_reduces: bool) -> None:
        """Note, when a reduction is issued, whether it will leave something here or take everything away."""
        if all_reduces:
            self._expected.difference_update(parameters)
        else:
            self._expected.update(parameters)

    def add(self, parameters: Sequence[ManagedParameter], reduced: torch.Tensor) -> None:
        """Sum the parameters' parts of ``reduced`` into what is there."""
        for parameter, part in self._arrangement.parts(parameters, reduced):
            earlier = self._sums.get(parameter)
            self._sums[parameter] = part if earlier is None else earlier.add_(part)

    def move_to(self, parameters: Sequence[ManagedParameter], reduced: torch.Tensor) -> None:
        """Sum what is there into the parameters' parts of ``reduced``, and forget it."""
        for parameter, part in self._arrangement.parts(parameters, reduced):
            earlier = self._sums.pop(parameter, None)
            if earlier is not None:
                part.add_(earlier)

    def clear(self) -> None:
        """Forget everything."""
        self._sums.clear()
        self._expected.clear()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReductionPlan:
    """What a group asks of one reduction.

    ``dtype`` is that on the wire, ``final_dtype`` and ``home`` are where gradients end up.
    """

    arrangement: Arrangement
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
    partial: Partial

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to communicate with, and nothing else to do."""
        is_lone = self.mesh.shard_size * self.mesh.replicate_size == 1
        return is_lone and self.hook is None and self.comm_hook is None and self.arrangement.keeps_apart


def reduction(parameters: Sequence[ManagedParameter], flat: torch.Tensor, plan: ReductionPlan) -> Reduction:
    """Reduce gradients that were ``cut`` into ``flat`` into the sharded parameters' gradients.

    Yields each collective that must be waited for before going on; runs without autograd.
    """
    if plan.comm_hook is not None:
        _hand_out(_reduced_by_hook(flat, plan.comm_hook, plan), parameters, plan)
        return
    reduced = flat
    if plan.mesh.shard_size > 1 and flat.numel():
        reduced = _row(flat, plan)
        assert plan.scatter_group is not None
        work = plan.scatter(
            output_tensor=reduced,
            input_tensor=flat,
            group=plan.scatter_group,
            op=plan.division.scatter_op,
            async_op=True,
        )
        if work is not None:
            yield InFlight(work, reduced)
    del flat
    if plan.mesh.is_replicated:
        with torch.no_grad():
            if not plan.all_reduces:
                plan.partial.add(parameters, reduced)
                return
            plan.partial.move_to(parameters, reduced)
    if plan.mesh.replicate_size > 1 and reduced.numel():
        work = dist.all_reduce(
            reduced, op=plan.division.reduce_op, group=plan.mesh.replicate_group, async_op=True
        )
        if work is not None:
            yield InFlight(work, reduced)
    with torch.no_grad():
        if plan.hook is not None:
            plan.hook(reduced)
        if plan.division.after != 1:
            reduced.div_(plan.division.after)
        _hand_out(reduced, parameters, plan)


def keep(parameters: Sequence[ManagedParameter], gradients: list[torch.Tensor], plan: ReductionPlan) -> None:
    """Make whole gradients the reduced ones, where there is one rank; rounded as the wire would round them."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        own = gradient.to(plan.dtype)
        if plan.division.total != 1:
            own = own / plan.division.total
        _hand_out(own.reshape(-1), (parameter,), plan)


def cut(
    parameters: Sequence[ManagedParameter], gradients: list[torch.Tensor], plan: ReductionPlan
) -> torch.Tensor:
    """Lay whole gradients out rank by rank, 1-D and in ``plan.dtype``; empties the list."""
    device = gradients[0].device

    def allocate(numel: int) -> torch.Tensor:
        return plan.scatter.allocate((numel,), dtype=plan.dtype, device=device)

    flat = plan.arrangement.cut(parameters, gradients, allocate)
    if plan.division.before != 1:
        flat.div_(plan.division.before)
    return flat


def _row(flat: torch.Tensor, plan: ReductionPlan) -> torch.Tensor:
    """Give memory for this rank's row of the sum."""
    size = (flat.numel() // plan.mesh.shard_size,)
    return plan.scatter.allocate(size, dtype=flat.dtype, device=flat.device)


def _reduced_by_hook(flat: torch.Tensor, hook: CommHook, plan: ReductionPlan) -> torch.Tensor:
    """Have the caller's hook reduce, divisions included."""
    with torch.no_grad():
        if plan.mesh.shard_size == 1:
            hook(flat)
            return flat
        row = _row(flat, plan)
        hook(flat, row)
        return row


def _hand_out(reduced: torch.Tensor, parameters: Sequence[ManagedParameter], plan: ReductionPlan) -> None:
    """Bring the reduced row home, as a view where dtype and device allow."""
    plan.arrangement.hand_out(parameters, reduced.to(device=plan.home, dtype=plan.final_dtype))
