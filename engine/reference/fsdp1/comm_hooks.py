"""torch's hooks that average one gradient over a group, and two of our own that do so in a narrower dtype.

torch's two low-precision hooks raise on a CPU after the reduction, because they use the result's stream.
"""

from __future__ import annotations

import torch

from shardproof.engine.reference.torch_private import default_hooks

__all__ = [
    "DefaultState",
    "LowPrecisionState",
    "allreduce_hook",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "reduce_scatter_hook",
]

DefaultState = default_hooks.DefaultState
LowPrecisionState = default_hooks.LowPrecisionState
allreduce_hook = default_hooks.allreduce_hook
reduce_scatter_hook = default_hooks.reduce_scatter_hook


def fp16_compress_hook(
    state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """Average with float16 communication: ``grad`` in place, or into ``output`` if given."""
    _reduce_as(torch.float16, state, grad, output)


def bf16_compress_hook(
    state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """Average with bfloat16 communication: ``grad`` in place, or into ``output`` if given."""
    _reduce_as(torch.bfloat16, state, grad, output)


def _reduce_as(
    dtype: torch.dtype, state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None
) -> None:
    """Reduce a copy in ``dtype``; both divisions use that dtype, as with a policy that sets the reduce dtype."""
    wire = grad.to(dtype)
    if output is None:
        allreduce_hook(state, wire)
        _put(grad, wire, state.parameter_type)
    else:
        part = output if output.dtype == dtype else torch.empty_like(output, dtype=dtype)
        reduce_scatter_hook(state, wire, part)
        _put(output, part, state.parameter_type)


def _put(target: torch.Tensor, result: torch.Tensor, dtype: torch.dtype) -> None:
    """Make ``target`` hold ``result`` in ``dtype``, in the same memory if it already has that dtype."""
    if target.dtype == dtype:
        if target is not result:
            target.copy_(result)
        return
    before = target.data
    target.data = result.to(dtype)
    if before.device.type != "cpu":
        # The memory may belong to another stream than its last reader: keep it until that read ends.
        before.record_stream(torch.get_device_module(before.device).current_stream())
