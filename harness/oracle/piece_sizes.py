"""The sizes of the pieces of a gradient: all that a verdict needs of them, in a few numbers for each parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shardproof.harness.oracle.absolute_error import largest
from shardproof.harness.torch_compat.dtypes import widened

_PIECE = 2**16  # elements; fits into the cache


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSizes:
    """The largest absolute values of sums of pieces, before any division.

    ``total`` is that of the sum over microbatches and ranks, ``absolute`` that of the sum of absolute values, and
    ``of_ranks`` has one for the sum over the microbatches of each rank.
    """

    total: float
    absolute: float
    of_ranks: tuple[float, ...]


def sizes_of(pieces: Sequence[Sequence[torch.Tensor]]) -> PieceSizes:
    """Measure ``pieces`` [microbatches][ranks] of one parameter."""
    total, absolute, of_ranks = 0.0, 0.0, [0.0] * len(pieces[0])
    for block in _blocks(pieces):  # [microbatches, ranks, elements]
        sums = block.sum(0)
        total = max(total, largest(sums.sum(0)))
        absolute = max(absolute, largest(block.abs().sum((0, 1))))
        of_ranks = [max(most, largest(own)) for most, own in zip(of_ranks, sums, strict=True)]
    return PieceSizes(total=total, absolute=absolute, of_ranks=tuple(of_ranks))


def _blocks(pieces: Sequence[Sequence[torch.Tensor]]) -> Iterator[torch.Tensor]:
    flat = [[piece.reshape(-1) for piece in of_ranks] for of_ranks in pieces]
    for start in range(0, flat[0][0].numel(), _PIECE):
        of_microbatches = [[widened(one[start : start + _PIECE]) for one in ranks] for ranks in flat]
        yield torch.stack([torch.stack(ranks) for ranks in of_microbatches])
