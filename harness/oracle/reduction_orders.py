"""Orders and dtypes in which the oracle adds gradients: the exact one, and others that an engine might use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce

import torch

from shardproof.engine.contract import Accumulation, Plan
from shardproof.harness.cases.batch import Batch, ModelBatch, Rows, converted, converted_tree
from shardproof.harness.torch_compat.dtypes import cast


@dataclass(frozen=True, slots=True, kw_only=True)
class Summation:
    """One way to compute a step's gradient from the pieces of all microbatches and ranks.

    ``dtype`` is that of the parameters, ``compute_dtype`` that of forward and backward, ``reduce_dtype`` that of the
    reduction between ranks; with None each tensor keeps its own. ``seed`` shuffles rows, microbatches and ranks; None
    keeps their order. ``is_tree`` adds in pairs, not one after the other; ``divides_first`` divides before adding, as
    engines do against overflow. ``accumulates_reduced`` keeps the local sum over microbatches in ``reduce_dtype``.
    ``keeps_rows`` leaves rows in their order, for models that draw random numbers. ``device`` is where all of it is
    computed: kernels of a device round otherwise than those of the CPU. ``uncast`` names parameters that keep their
    dtype, since the engine ignores them.
    """

    dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    compute_dtype: torch.dtype | None
    seed: int | None = None
    is_tree: bool = False
    divides_first: bool = False
    accumulates_reduced: bool = False
    keeps_rows: bool = False
    device: str = "cpu"
    uncast: tuple[str, ...] = ()

    def prepare(self, batch: Batch) -> Batch:
        """Cast the inputs' floats to ``compute_dtype``, those of the target to ``dtype``, and shuffle the rows."""
        if isinstance(batch, ModelBatch):  # which tensors have rows, and in which dim, is unknown
            # All tensors in one dtype: the loss receives the batch whole.
            return converted(batch, lambda tensor: self.moved(cast(tensor, self.dtype)))
        order = torch.tensor(
            _order(None if self.keeps_rows else self.seed, batch.target.shape[0]), dtype=torch.long
        )
        inputs = converted_tree(
            batch.inputs, lambda tensor: self.moved(cast(tensor, self.compute_dtype)[order])
        )
        return Rows(inputs=inputs, target=self.moved(cast(batch.target, self.dtype)[order]))

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device that computes."""
        return tensor.to(self.device)

    def reduce(self, pieces: Sequence[Sequence[torch.Tensor]] | torch.Tensor, plan: Plan) -> torch.Tensor:
        """Add ``pieces`` [microbatches][ranks] over both, divided by the plan's divisor."""
        ranks = _order(self.seed, len(pieces[0]))
        rows = [[pieces[m][rank] for rank in ranks] for m in _order(self.seed, len(pieces))]
        divisor, dtype = plan.divisor(len(ranks)), self.dtype or rows[0][0].dtype
        if plan.accumulation is Accumulation.EVERY_MICROBATCH:
            return self._sum([self._divided(of_ranks, divisor, dtype) for of_ranks in rows])
        if self.accumulates_reduced:
            rows = [[cast(piece, self.reduce_dtype) for piece in of_ranks] for of_ranks in rows]
        return self._divided([self._sum(of_rank) for of_rank in zip(*rows, strict=True)], divisor, dtype)

    def _divided(self, of_ranks: Sequence[torch.Tensor], divisor: float, dtype: torch.dtype) -> torch.Tensor:
        if self.divides_first:
            return cast(self._sum([cast(piece / divisor, self.reduce_dtype) for piece in of_ranks]), dtype)
        total = self._sum([cast(piece, self.reduce_dtype) for piece in of_ranks])
        # A sum of several is a new tensor: to divide it in place saves a pass over memory.
        return cast(total.div_(divisor) if len(of_ranks) > 1 else total / divisor, dtype)

    def _sum(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Add one after the other, so that every addition rounds, or in pairs."""
        if len(pieces) > 1 and self.is_tree:
            middle = len(pieces) // 2
            return self._sum(pieces[:middle]) + self._sum(pieces[middle:])
        return reduce(torch.add, pieces)


@lru_cache(maxsize=2**10)  # each parameter of each step uses one of the same few
def _order(seed: int | None, size: int) -> tuple[int, ...]:
    if seed is None:
        return tuple(range(size))
    generator = torch.Generator().manual_seed(seed * 1_000 + size)
    return tuple(torch.randperm(size, generator=generator).tolist())


EXACT_ORDER = Summation(dtype=torch.float64, reduce_dtype=torch.float64, compute_dtype=torch.float64)
# The reference of a model without a float64 reference: only its sums over ranks have more bits than its dtype.
OWN_ORDER = Summation(dtype=None, reduce_dtype=torch.float64, compute_dtype=None)


def reference_order(is_widened: bool, dtype: torch.dtype | None) -> Summation:
    """Return the order of the reference, for parameters of ``dtype``."""
    return EXACT_ORDER if is_widened else replace(OWN_ORDER, dtype=dtype)


def is_of_full_precision(plan: Plan, dtype: torch.dtype | None) -> bool:
    """Whether parameters of ``dtype`` are computed with and reduced in at least float32; None means float32."""
    return plan.compute_dtype is None and reduces_fully(plan, dtype)


def reduces_fully(plan: Plan, dtype: torch.dtype | None) -> bool:
    """Whether gradients of parameters of ``dtype`` are reduced in at least float32."""
    return {plan.reduction_dtype, dtype} <= {None, torch.float32, torch.float64}


def num_reorderings(plan: Plan) -> int:
    """Return the number of float32 runs that estimate the noise; harness.laws.tolerance measured its multiple for it.

    A reduction in fewer bits rounds so coarsely that four runs can all be right by chance.
    """
    return 4 if plan.reduction_dtype in (None, torch.float32) else 8


def reordering(number: int, plan: Plan, dtype: torch.dtype | None = None) -> Summation:
    """Return the ``number``-th order for parameters of ``dtype``; all combinations of tree and division come first.

    With None, parameters keep the dtypes in which they are built.
    """
    return Summation(
        dtype=dtype,
        reduce_dtype=plan.reduction_dtype or dtype,
        compute_dtype=plan.compute_dtype or dtype,
        seed=number,
        is_tree=number % 2 == 1,
        # The sum of the ranks' float16 gradients may overflow: there an engine has to divide first.
        divides_first=number // 2 % 2 == 1 or plan.reduction_dtype is torch.float16,
        accumulates_reduced=number // 4 % 2 == 1,
        uncast=plan.ignored,
    )


_NUM_PROBED = 2**12  # elements: so many that two orders of at least three terms do not round alike by chance


def distinct(
    orders: Sequence[Summation], plan: Plan, num_microbatches: int, num_ranks: int
) -> list[Summation]:
    """Leave out the orders that round all sums of pieces as an earlier one does, as both orders of two ranks do.

    Only useful if rows keep their places, because sums over rows are not compared.
    """
    generator = torch.Generator().manual_seed(0)
    kept: list[Summation] = []
    seen: list[torch.Tensor] = []
    probe = torch.randn(num_microbatches, num_ranks, _NUM_PROBED, generator=generator)
    for order in orders:
        reduced = order.reduce(cast(probe, order.dtype), plan)
        if not any(torch.equal(reduced, other) for other in seen):
            kept.append(order)
            seen.append(reduced)
    return kept
