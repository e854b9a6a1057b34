"""By what, when and with which reduce op summed gradients are divided."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

__all__ = ["Division", "division"]

# Enough exponent for a sum over any number of ranks; every other dtype is scaled down before the sum.
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
        """What is divided by outside of the reduce ops."""
        return self.before * self.after


def division(
    *, dtype: torch.dtype, shard_size: int, replicate_size: int, factor: float | None, only_sums: bool
) -> Division:
    """Choose the division that turns a sum over all ranks into sum / factor (default: the mean).

    The division is part of the reduction, once, whichever of the two collectives exist: a shard group of one
    rank has no reduce-scatter, and the factor holds all the same. AVG is used where it says what is meant;
    another factor is divided by afterwards, on the small reduced tensor.
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
    """Divide by about the square root before the sum and by the rest after it: neither end of the range is hit.

    ``before`` is a power of two, so that dividing by it is exact.
    """
    before = 1.0
    while factor % before == 0 and factor / before > before:
        before *= 2
    return Division(before=before, after=factor / before)
