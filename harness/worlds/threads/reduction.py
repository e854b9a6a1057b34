"""The arithmetic of a reduction between ranks that are threads, and the supported ops and dtypes.

[Note: order of accumulation] A reduction starts from rank 0's values and adds the other ranks in rank order, one at a
time, in the tensors' own dtype: ((x0 + x1) + x2) + x3. Every rank gets that one result. An average is that sum divided
by the number of ranks, with the division in the tensors' dtype as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
import torch.distributed as dist

from shardproof.harness.errors import CollectiveRefusedError
from shardproof.harness.worlds.threads.premultiplied_sum import PREMULTIPLIED

RedOp = dist.ReduceOp.RedOpType

# By the op's name; each takes the accumulated tensor and the next rank's, and writes into the first.
_STEPS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "SUM": lambda total, x: total.add_(x),
    PREMULTIPLIED: lambda total, x: total.add_(x),  # of products, which each rank has made
    "AVG": lambda total, x: total.add_(x),
    "PRODUCT": lambda total, x: total.mul_(x),
    "MIN": lambda total, x: torch.minimum(total, x, out=total),
    "MAX": lambda total, x: torch.maximum(total, x, out=total),
    "BAND": lambda total, x: total.bitwise_and_(x),
    "BOR": lambda total, x: total.bitwise_or_(x),
    "BXOR": lambda total, x: total.bitwise_xor_(x),
}
_BITWISE = frozenset({"BAND", "BOR", "BXOR"})
_ORDERED = frozenset({"MIN", "MAX"})


def check_reducible(op: RedOp, dtype: torch.dtype, where: str, device: str = "cpu") -> None:
    """Raise CollectiveRefusedError if ``op`` has no meaning for ``dtype``, or the backends of a device lack it."""
    name = _name(op)
    is_real_number = dtype.is_floating_point or dtype.is_complex
    if name not in _STEPS or (name == PREMULTIPLIED and device == "cpu"):
        names = [known for known in _STEPS if known != PREMULTIPLIED]
        raise _refusal(where, "one of " + ", ".join(names), name, "scale before a SUM")
    if name in {"AVG", PREMULTIPLIED} and not is_real_number:
        raise _refusal(where, f"{name} of floating-point tensors", f"{name} of {dtype}", "SUM, then divide")
    if name in _BITWISE and is_real_number:
        raise _refusal(where, f"{name} of integers", f"{name} of {dtype}", "an integer dtype")
    if name in _ORDERED and dtype.is_complex:
        raise _refusal(where, f"{name} of ordered numbers", f"{name} of {dtype}", "torch.view_as_real")


def reduce_flat(op: RedOp, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Reduce one tensor per rank into a new flat one; see [Note: order of accumulation]."""
    total = tensors[0].clone(memory_format=torch.contiguous_format).view(-1)
    name = _name(op)
    step = _STEPS[name]
    for tensor in tensors[1:]:
        step(total, tensor.reshape(-1))
    if name == "AVG":
        total.div_(len(tensors))
    return total


@cache  # the binding finds its name by a search over all members, which costs more than a small reduction
def _name(op: RedOp) -> str:
    return op.name


def _refusal(where: str, expected: str, got: str, hint: str) -> CollectiveRefusedError:
    return CollectiveRefusedError(where, expected=expected, got=got, hint=hint)
