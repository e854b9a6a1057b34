"""What the outputs of a call hold until its result is there: nothing that an engine can mistake for a result."""

from __future__ import annotations

from functools import cache

import torch

from harness.tracing.collectives.call import Call
from harness.tracing.ledger import Op

__all__ = ["poison", "poisoned", "spared_piece"]

# Has both halves of every byte wrong for indices and counts, and is negative in every signed dtype.
_GARBAGE_BYTE = 0xA5


def poison(call: Call, seed: int) -> None:
    """Overwrite the outputs of a call that is under way."""
    for i, outputs in enumerate(call.outputs):
        spared = spared_piece(call, i)
        for output in outputs:
            # A root, or a rank gathering in place, may go on reading what it gave.
            if spared is None or output.data_ptr() != spared.data_ptr():
                output.fill_(_garbage(output.dtype, seed))


def spared_piece(call: Call, i: int) -> torch.Tensor | None:
    """Give the tensor whose values the call does not change for its caller, should an output alias it."""
    inputs = call.inputs[i] if i < len(call.inputs) else ()
    if not inputs:
        return None
    if call.op is Op.SCATTER:
        return inputs[call.rank]
    return inputs[0] if call.op in {Op.BROADCAST, Op.ALL_GATHER, Op.GATHER} else None


@cache
def poisoned(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Give one element of poison, 1-D."""
    return torch.empty(1, dtype=dtype).fill_(_garbage(dtype, seed))


def _garbage(dtype: torch.dtype, seed: int) -> complex | float | int | bool:
    if dtype.is_complex:
        return complex("nan+nanj")
    if dtype.is_floating_point:
        return float("nan")
    if dtype is torch.bool:
        return seed % 2 == 0
    byte = (_GARBAGE_BYTE + seed) % 128
    # The top bit makes it negative where there is a sign, and too large to be an index where there is none.
    return byte - 128 if dtype.is_signed else byte + 128
