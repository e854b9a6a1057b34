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
from engine.mutants.mutant import Condition, Trace, mutant
from engine.mutants.plans import WRAPPED
from engine.mutants.wrapper_names import swapping


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


@mutant(after="pytorch/pytorch#180665", kills_on=Condition(plan=WRAPPED, because="nothing else is offloaded"))
class ReadsOffloadedGradientsTooEarly(FullyShardedDataParallelEngine):
    """Offloaded gradients are read before they are there.

    Reported: the copy of gradients to the host was not waited for.
    """

    names: ClassVar[WrapperNames] = replace(NAMES, FullyShardedDataParallel=_Early)


@mutant(
    after="pytorch/pytorch#107058",
    kills_on=Condition(plan=WRAPPED, because="only the order of calls shows it"),
    trace=Trace.COMMUNICATION,
)
class SwapsBackwardPrefetch(FullyShardedDataParallelEngine):
    """Each moment of backward prefetch is taken for another.

    Reported: nothing would have shown whether backward prefetches at all.
    """

    names: ClassVar[WrapperNames] = swapping(
        "backward_prefetch",
        {
            BackwardPrefetch.BACKWARD_PRE: BackwardPrefetch.BACKWARD_POST,
            BackwardPrefetch.BACKWARD_POST: None,
            None: BackwardPrefetch.BACKWARD_PRE,
        },
    )


@mutant(
    after="pytorch/pytorch#106030",
    kills_on=Condition(plan=WRAPPED, because="only the order of calls shows it"),
    trace=Trace.COMMUNICATION,
)
class InvertsForwardPrefetch(FullyShardedDataParallelEngine):
    """Forward prefetches unless asked to.

    Reported: nothing would have shown whether forward prefetches at all.
    """

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


@mutant(
    after="pytorch/pytorch#107058",
    kills_on=Condition(plan=WRAPPED, because="a lone rank gathers nothing"),
    trace=Trace.COMMUNICATION,
)
class GathersAllUnitsAtOnce(FullyShardedDataParallelEngine):
    """Every unit is being gathered before the first one runs.

    Reported: nothing would have shown what is gathered when.
    """

    names: ClassVar[WrapperNames] = replace(NAMES, FullyShardedDataParallel=_Greedy)


class _Local(ShardedGradScaler):
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at this rank's gradients alone."""
        GradScaler.unscale_(self, optimizer)


@mutant(
    after="pytorch/pytorch#115710",
    kills_on=Condition(plan=WRAPPED, because="finite gradients are nobody else's business"),
    trace=Trace.STATE,
)
class KeepsOverflowLocal(FullyShardedDataParallelEngine):
    """A rank skips a step by itself when its gradients are infinite.

    Reported: one rank saw an overflow, and the others kept their scale.
    """

    names: ClassVar[WrapperNames] = replace(NAMES, ShardedGradScaler=_Local)


class _PreparedDivided(PreparedFsdp1):
    divisor = 1

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss / self.divisor)


@mutant(
    after="NVIDIA/Megatron-LM#3023", kills_on=Condition(plan=WRAPPED, because="a lone rank divides by one")
)
class DividesWrappedGradientsTwice(FullyShardedDataParallelEngine):
    """Wrapped gradients are divided by the number of ranks twice.

    Reported: gradients were scaled in two places, each as if the other were not there.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap honestly; divide every loss."""
        prepared = _PreparedDivided(super().prepare(model, plan, mesh).module, model, self.names)
        prepared.divisor = mesh.size()
        return prepared


class _PreparedEager(PreparedFsdp1):
    def accumulating(self) -> AbstractContextManager[None]:
        return nullcontext()


@mutant(
    after="Haian-Jin/LVSM#22",
    kills_on=Condition(plan=WRAPPED, because="the last microbatch is reduced anyway"),
    trace=Trace.COMMUNICATION,
)
class ReducesDespiteNoSync(FullyShardedDataParallelEngine):
    """Wrapped microbatches are all reduced within no_sync.

    Reported: forward ran outside of the context that was to hold reductions back.
    """

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap honestly; hold nothing back."""
        return _PreparedEager(super().prepare(model, plan, mesh).module, model, self.names)
