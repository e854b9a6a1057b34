"""Mutants that take a wrapped step wrongly: its gathers, its reductions, its gradients, its scale."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from engine.adapters.torch_fsdp1 import NAMES, FullyShardedDataParallelEngine, PreparedFsdp1
from engine.contract import Plan, PreparedModel, WrapperNames
from engine.mutants.wrapper_names import swapping

__all__ = [
    "DividesWrappedGradientsTwice",
    "GathersAllUnitsAtOnce",
    "InvertsForwardPrefetch",
    "KeepsOverflowLocal",
    "ReadsOffloadedGradientsTooEarly",
    "ReducesDespiteNoSync",
    "SwapsBackwardPrefetch",
]


class _Early(FullyShardedDataParallel):
    # Any: arguments of the wrapper, and of the module.
    def __init__(self, module: nn.Module, cpu_offload: Any = None, **options: Any) -> None:
        super().__init__(module, **options)
        self._is_early = cpu_offload is not None and cpu_offload.offload_params

    def forward(self, *inputs: Any, **named: Any) -> Any:
        output = super().forward(*inputs, **named)
        if self._is_early:
            output.register_hook(torch.zeros_like)
        return output


class ReadsOffloadedGradientsTooEarly(FullyShardedDataParallelEngine):
    """With CPUOffload the optimizer reads gradients on the host before they are there: it finds zeros.

    After pytorch/pytorch#180665: the copy of gradients to the host was not waited for.
    """

    name = "mutant.ReadsOffloadedGradientsTooEarly"
    names: ClassVar[WrapperNames] = replace(NAMES, FullyShardedDataParallel=_Early)


class SwapsBackwardPrefetch(FullyShardedDataParallelEngine):
    """BACKWARD_PRE gathers after gradients, BACKWARD_POST when needed, None before; the numbers are right.

    After pytorch/pytorch#107058: nothing would have shown whether backward prefetches at all.
    """

    name = "mutant.SwapsBackwardPrefetch"
    names: ClassVar[WrapperNames] = swapping(
        "backward_prefetch",
        {
            BackwardPrefetch.BACKWARD_PRE: BackwardPrefetch.BACKWARD_POST,
            BackwardPrefetch.BACKWARD_POST: None,
            None: BackwardPrefetch.BACKWARD_PRE,
        },
    )


class InvertsForwardPrefetch(FullyShardedDataParallelEngine):
    """Forward prefetches unless it is asked to; the numbers are right.

    After pytorch/pytorch#106030: nothing would have shown whether forward prefetches at all.
    """

    name = "mutant.InvertsForwardPrefetch"
    names: ClassVar[WrapperNames] = swapping("forward_prefetch", {False: True, True: False})


class _Greedy(FullyShardedDataParallel):
    # Any: a module takes and returns what it likes.
    def forward(self, *inputs: Any, **named: Any) -> Any:
        works = [*self._gathers_of_units()]
        output = super().forward(*inputs, **named)
        for work in works:
            work.wait()
        return output

    def _gathers_of_units(self) -> Iterable[Any]:
        for unit in FullyShardedDataParallel.fsdp_modules(self):
            handle = unit._handle
            if handle is not None and handle.world_size > 1:
                shard = handle.flat_param.detach()
                whole = shard.new_empty(shard.numel() * handle.world_size)
                yield dist.all_gather_into_tensor(whole, shard, group=handle.process_group, async_op=True)


class GathersAllUnitsAtOnce(FullyShardedDataParallelEngine):
    """The root starts to gather every unit before the first one runs, limit or not; the numbers are right.

    After pytorch/pytorch#107058: nothing would have shown what is gathered when.
    """

    name = "mutant.GathersAllUnitsAtOnce"
    names: ClassVar[WrapperNames] = replace(NAMES, FullyShardedDataParallel=_Greedy)


class _Local(ShardedGradScaler):
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at this rank's gradients alone."""
        GradScaler.unscale_(self, optimizer)


class KeepsOverflowLocal(FullyShardedDataParallelEngine):
    """A rank skips the step for its own infinite gradients alone.

    After pytorch/pytorch#115710: one rank saw an overflow, and the others kept their scale.
    """

    name = "mutant.KeepsOverflowLocal"
    names: ClassVar[WrapperNames] = replace(NAMES, ShardedGradScaler=_Local)


class _PreparedDivided(PreparedFsdp1):
    divisor = 1

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss / self.divisor)


class DividesWrappedGradientsTwice(FullyShardedDataParallelEngine):
    """Gradients are divided by the number of ranks once more.

    After NVIDIA/Megatron-LM#3023: gradients were scaled in two places, each as if the other were not there.
    """

    name = "mutant.DividesWrappedGradientsTwice"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap honestly; divide every loss."""
        prepared = _PreparedDivided(super().prepare(model, plan, mesh).module, model, self.names)
        prepared.divisor = mesh.size()
        return prepared


class _PreparedEager(PreparedFsdp1):
    def accumulating(self) -> AbstractContextManager[None]:
        return nullcontext()


class ReducesDespiteNoSync(FullyShardedDataParallelEngine):
    """no_sync has no effect: every microbatch is reduced; the numbers are right.

    After Haian-Jin/LVSM#22: forward ran outside of the context that was to hold reductions back.
    """

    name = "mutant.ReducesDespiteNoSync"

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap honestly; hold nothing back."""
        return _PreparedEager(super().prepare(model, plan, mesh).module, model, self.names)
