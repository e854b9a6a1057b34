"""One group's gradients on their way from whole to reduced shards, as a generator that stops at each wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from engine.reference.collectives import ReduceScatter
from engine.reference.division import Division
from engine.reference.lanes import InFlight, Reduction
from engine.reference.mesh import DataMesh
from engine.reference.parameter import ShardedParameter
from engine.reference.torch_internals import post_accumulate_hooks

__all__ = ["Partial", "ReductionPlan", "cut", "keep", "reduction"]


class Partial:
    """Gradients that were reduce-scattered but not yet all-reduced over replicas: 1-D padded shards."""

    def __init__(self) -> None:
        self._expected: set[ShardedParameter] = set()
        self._sums: dict[ShardedParameter, torch.Tensor] = {}

    def __contains__(self, parameter: ShardedParameter) -> bool:
        """Whether something of ``parameter`` is here, or on its way."""
        return parameter in self._expected

    def expect(self, parameters: Sequence[ShardedParameter], *, all_reduces: bool) -> None:
        """Note, when a reduction is issued, whether it will leave something here or take everything away."""
        if all_reduces:
            self._expected.difference_update(parameters)
        else:
            self._expected.update(parameters)

    def add(self, parameters: Sequence[ShardedParameter], reduced: torch.Tensor) -> None:
        """Sum the parameters' parts of ``reduced`` into what is there."""
        for parameter, part in _parts(parameters, reduced):
            earlier = self._sums.get(parameter)
            self._sums[parameter] = part if earlier is None else earlier.add_(part)

    def move_to(self, parameters: Sequence[ShardedParameter], reduced: torch.Tensor) -> None:
        """Sum what is there into the parameters' parts of ``reduced``, and forget it."""
        for parameter, part in _parts(parameters, reduced):
            earlier = self._sums.pop(parameter, None)
            if earlier is not None:
                part.add_(earlier)

    def clear(self) -> None:
        """Forget everything."""
        self._sums.clear()
        self._expected.clear()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReductionPlan:
    """What a group asks of one reduction; ``dtype`` is that on the wire, ``home`` where gradients end up."""

    mesh: DataMesh
    division: Division
    dtype: torch.dtype
    home: torch.device
    scatter: ReduceScatter
    scatter_group: dist.ProcessGroup | None
    all_reduces: bool
    hook: Callable[[torch.Tensor], None] | None
    partial: Partial

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to communicate with, and nothing else to do."""
        return self.mesh.shard_size * self.mesh.replicate_size == 1 and self.hook is None


def reduction(parameters: Sequence[ShardedParameter], flat: torch.Tensor, plan: ReductionPlan) -> Reduction:
    """Reduce gradients that were ``cut`` into ``flat`` into the sharded parameters' gradients.

    Yields each collective that must be waited for before going on; runs without autograd.
    """
    reduced = flat
    if plan.mesh.shard_size > 1 and flat.numel():
        reduced = plan.scatter.allocate(
            (flat.numel() // plan.mesh.shard_size,), dtype=flat.dtype, device=flat.device
        )
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
    if plan.mesh.replicate_axis is not None:
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


def keep(parameters: Sequence[ShardedParameter], gradients: list[torch.Tensor], plan: ReductionPlan) -> None:
    """Make whole gradients the reduced ones, where there is one rank; rounded as the wire would round them."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        own = gradient.to(plan.dtype)
        if plan.division.total != 1:
            own = own / plan.division.total
        _hand_out(own.reshape(-1), (parameter,), plan)


def cut(
    parameters: Sequence[ShardedParameter], gradients: list[torch.Tensor], plan: ReductionPlan
) -> torch.Tensor:
    """Lay gradients (plain, whole, one per parameter) out rank by rank; empties the list.

    Gives 1-D, in ``plan.dtype``: ``shard_size`` rows of all parameters' padded shards.
    """
    ranks = plan.mesh.shard_size
    sizes = [p.geometry.padded_numel for p in parameters]
    flat = plan.scatter.allocate((ranks * sum(sizes),), dtype=plan.dtype, device=gradients[0].device)
    by_rank = flat.view(ranks, sum(sizes))
    if ranks == 1 or all(p.geometry.is_even and p.geometry.dim == 0 for p in parameters):
        rows = [g.reshape(ranks, n) for g, n in zip(gradients, sizes, strict=True)]
        torch.cat(rows, dim=1, out=by_rank)
    else:
        for parameter, gradient, out in zip(parameters, gradients, by_rank.split(sizes, dim=1), strict=True):
            parameter.geometry.cut(gradient, out)
    gradients.clear()
    if plan.division.before != 1:
        flat.div_(plan.division.before)
    return flat


def _hand_out(reduced: torch.Tensor, parameters: Sequence[ShardedParameter], plan: ReductionPlan) -> None:
    """Give each parameter its part of the reduced tensor, as a view where dtype and device allow."""
    dtype = parameters[0].local.dtype
    reduced = reduced.to(device=plan.home, dtype=dtype)
    for parameter, part in _parts(parameters, reduced):
        parameter.accept_gradient(parameter.geometry.own_part(part))
        for hook in post_accumulate_hooks(parameter.sharded):
            hook(parameter.sharded)


def _parts(
    parameters: Sequence[ShardedParameter], reduced: torch.Tensor
) -> Iterator[tuple[ShardedParameter, torch.Tensor]]:
    """Give each parameter with its padded shard in ``reduced``, as a view."""
    sizes = [p.geometry.padded_numel for p in parameters]
    yield from zip(parameters, reduced.split(sizes), strict=True)
