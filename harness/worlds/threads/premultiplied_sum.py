"""The factors of premultiplied sums, which nccl multiplies and sums in one kernel.

A kernel of c10d receives the operation as an object that shows its kind and hides its factor. So each rank remembers
the factor that it made last: FSDP2 makes an operation for each reduction, just before it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from shardproof.harness.errors import CollectiveRefusedError
from shardproof.harness.torch_compat.patching import Replacement
from shardproof.harness.tracing.collectives.call import Call, Pieces

PREMULTIPLIED = "PREMUL_SUM"


class _Made(threading.local):
    factor: float | torch.Tensor | None = None


_made = _Made()


def multiplied(call: Call) -> Pieces:
    """Return the inputs of a premultiplied sum times the calling rank's factor; raises CollectiveRefusedError."""
    factor = _made.factor
    if factor is None:
        raise CollectiveRefusedError(
            str(call),
            expected="a factor that this thread made",
            got="none",
            hint="ReduceOp.PREMUL_SUM(FACTOR)",
        )
    return tuple(tuple(tensor * factor for tensor in pieces) for pieces in call.inputs)


def factors_remembered() -> Replacement:
    """Remember the factor of each premultiplied sum that a rank makes, until exit."""
    return Replacement(_replacements)


# Any: classes and functions that torch leaves untyped.
def _replacements() -> Iterator[tuple[Any, str, Any]]:
    for holder, name in ((dist.ReduceOp.RedOpType, "__call__"), (dist, "_make_nccl_premul_sum")):
        if name in vars(holder):  # releases differ in the names that they have
            yield holder, name, _remembering(vars(holder)[name])


def _remembering(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any) -> Any:
        _made.factor = args[-1]
        return make(*args)

    return made
