"""Hooks that average one gradient over a group, whole or into shards, in its own dtype or a narrower one."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardproof.engine.reference.collectives import DefaultReduceScatter

_reduce_scatter = DefaultReduceScatter()


class DefaultState:
    """A group, and by what a gradient is divided before and after it is summed: by its size in all.

    Both factors are near the root of the size, so that neither end of a narrow dtype's range is hit. A caller
    may set others.
    """

    __slots__ = ("gradient_postdivide_factor", "gradient_predivide_factor", "process_group", "world_size")

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        if process_group is None:
            raise ValueError(
                f"{type(self).__name__}: expected to pass in an explicit ProcessGroup, got None; "
                "try torch.distributed.group.WORLD"
            )
        self.process_group = process_group
        self.world_size = dist.get_world_size(process_group)
        self.gradient_predivide_factor = _power_of_two_near_root(self.world_size)
        self.gradient_postdivide_factor = self.world_size / self.gradient_predivide_factor


class LowPrecisionState(DefaultState):
    """What ``DefaultState`` holds, and the dtype that results get: that of the parameters."""

    __slots__ = ("parameter_type",)

    def __init__(self, process_group: dist.ProcessGroup, parameter_type: torch.dtype = torch.float32) -> None:
        super().__init__(process_group)
        self.parameter_type = parameter_type


def allreduce_hook(state: DefaultState, grad: torch.Tensor) -> None:
    """Average ``grad`` over the group, in place."""
    _divide(grad, state.gradient_predivide_factor)
    dist.all_reduce(grad, group=state.process_group)
    _divide(grad, state.gradient_postdivide_factor)


def reduce_scatter_hook(state: DefaultState, grad: torch.Tensor, output: torch.Tensor) -> None:
    """Average this rank's part of ``grad`` over the group into ``output``; what ``grad`` then holds is undefined."""
    _divide(grad, state.gradient_predivide_factor)
    _reduce_scatter(output, grad, state.process_group, dist.ReduceOp.SUM)
    _divide(output, state.gradient_postdivide_factor)


def fp16_compress_hook(
    state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """Average as float16 on the wire: ``grad`` in place, or into ``output`` where one is given."""
    _reduce_as(torch.float16, state, grad, output)


def bf16_compress_hook(
    state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """Average as bfloat16 on the wire: ``grad`` in place, or into ``output`` where one is given."""
    _reduce_as(torch.bfloat16, state, grad, output)


def _power_of_two_near_root(size: int) -> float:
    """Return a power of two that divides ``size``, so that the first division is exact."""
    factor = 1
    while size % factor == 0 and size / factor > factor:
        factor *= 2
    return float(factor)


def _divide(tensor: torch.Tensor, factor: float) -> None:
    if factor > 1:
        tensor.div_(factor)


def _reduce_as(
    dtype: torch.dtype, state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None
) -> None:
    """Reduce a copy in ``dtype``; both divisions happen in it, as they do where a policy sets the reduce dtype."""
    wire = grad.to(dtype)
    if output is None:
        allreduce_hook(state, wire)
        _put(grad, wire, state.parameter_type)
    else:
        part = output if output.dtype == dtype else torch.empty_like(output, dtype=dtype)
        reduce_scatter_hook(state, wire, part)
        _put(output, part, state.parameter_type)


def _put(target: torch.Tensor, result: torch.Tensor, dtype: torch.dtype) -> None:
    """Make ``target`` hold ``result`` in ``dtype``, in its own memory where that has the dtype already."""
    if target.dtype == dtype:
        if target is not result:
            target.copy_(result)
        return
    before = target.data
    target.data = result.to(dtype)
    if before.device.type != "cpu":
        # Of another stream, maybe, than the one that just read it: not to be handed out before that is done.
        before.record_stream(torch.get_device_module(before.device).current_stream())
