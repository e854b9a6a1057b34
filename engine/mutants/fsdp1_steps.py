"""Mutants of a training step under FSDP1: `no_sync`, prefetching, gradients and their scale."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import HandleShardingStrategy as _Strategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from shardproof.engine.adapters.torch_fsdp1 import NAMES, FullyShardedDataParallelEngine
from shardproof.engine.contract import Plan, PreparedModel
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import dividing_losses, holding_nothing_back, swapping

# Any, throughout: arguments and results of torch's own methods.


def _handles(root: FullyShardedDataParallel) -> list[Any]:
    units = FullyShardedDataParallel.fsdp_modules(root)
    return [unit._handle for unit in units if unit._handle is not None]


@mutant(after="pytorch/pytorch#75892", trace=Trace.COMMUNICATION)
class KeepsTheRootInNoSync(FullyShardedDataParallelEngine):
    """Inside no_sync the root keeps its gathered parameters, so that the next step gathers less."""

    class Wrapper(FullyShardedDataParallel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            handle: Any = self._handle
            frees = self._sync_gradients
            if handle is not None and handle._sharding_strategy is not _Strategy.NO_SHARD:
                handle._sharding_strategy = _Strategy.FULL_SHARD if frees else _Strategy.SHARD_GRAD_OP
            return super().forward(*args, **kwargs)


@mutant(after="NVIDIA/cosmos-framework#161", trace=Trace.COMMUNICATION)
class FreesInNoSync(FullyShardedDataParallelEngine):
    """Parameters that should stay gathered from step to step inside no_sync are freed, and gathered again."""

    class Wrapper(FullyShardedDataParallel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            for handle in _handles(self):
                if not self._sync_gradients and handle._sharding_strategy is _Strategy.SHARD_GRAD_OP:
                    handle._sharding_strategy = _Strategy.FULL_SHARD
            return super().forward(*args, **kwargs)


def _silence(root: FullyShardedDataParallel, *, is_silent: bool) -> None:
    units: list[Any] = [*FullyShardedDataParallel.fsdp_modules(root)]
    for unit in units:
        unit._sync_gradients = not is_silent


@contextmanager
def _silenced(root: FullyShardedDataParallel) -> Iterator[None]:
    _silence(root, is_silent=True)
    try:
        yield
    finally:
        _silence(root, is_silent=False)


@mutant(after="speechbrain/speechbrain#2010", trace=Trace.COMMUNICATION)
class EndsAllNoSyncsAtOnce(FullyShardedDataParallelEngine):
    """The end of an inner no_sync ends the outer one too."""

    class Wrapper(FullyShardedDataParallel):
        def no_sync(self) -> Any:
            return _silenced(self)


@mutant(after="pytorch/torchtitan#3724", trace=Trace.COMMUNICATION)
class StaysSilentAfterAnException(FullyShardedDataParallelEngine):
    """An exception inside no_sync leaves gradients unsynchronised permanently."""

    class Wrapper(FullyShardedDataParallel):
        @contextmanager
        def no_sync(self) -> Iterator[None]:
            _silence(self, is_silent=True)
            yield
            _silence(self, is_silent=False)


@mutant(after="speechbrain/speechbrain#2010", trace=Trace.SILENCE)
class SilencesUnitsAlone(FullyShardedDataParallelEngine):
    """no_sync of a unit inside the root holds only that unit back."""

    class Wrapper(FullyShardedDataParallel):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for unit in FullyShardedDataParallel.fsdp_modules(self):
                unit.__class__ = type(self)  # torch makes units of its own class

        def no_sync(self) -> Any:
            return _silenced(self)


@mutant(after="pytorch/pytorch#180665", phase="reduce")
class ReadsOffloadedGradientsTooEarly(FullyShardedDataParallelEngine):
    """Offloaded gradients are read before they have arrived."""

    class Wrapper(FullyShardedDataParallel):
        # Any: arguments of the wrapper, and of the module.
        def __init__(self, module: nn.Module, cpu_offload: Any = None, **options: Any) -> None:
            super().__init__(module, **options)
            self._is_early = cpu_offload is not None and cpu_offload.offload_params

        def forward(self, *inputs: Any, **named: Any) -> Any:
            output = super().forward(*inputs, **named)
            if self._is_early:
                output.register_hook(torch.zeros_like)
            return output


@mutant(after="pytorch/pytorch#107058", trace=Trace.COMMUNICATION)
class SwapsBackwardPrefetch(FullyShardedDataParallelEngine):
    """Each option of backward prefetch is taken for another."""

    names = swapping(
        "backward_prefetch",
        {
            BackwardPrefetch.BACKWARD_PRE: BackwardPrefetch.BACKWARD_POST,
            BackwardPrefetch.BACKWARD_POST: None,
            None: BackwardPrefetch.BACKWARD_PRE,
        },
    )


@mutant(after="pytorch/pytorch#106030", trace=Trace.COMMUNICATION)
class InvertsForwardPrefetch(FullyShardedDataParallelEngine):
    """Forward prefetches unless asked to."""

    names = swapping("forward_prefetch", {False: True, True: False})


@mutant(after="pytorch/pytorch#107058", trace=Trace.COMMUNICATION)
class GathersAllUnitsAtOnce(FullyShardedDataParallelEngine):
    """Every unit is being gathered before the first one runs."""

    class Wrapper(FullyShardedDataParallel):
        # Any: a module's inputs and outputs are of any type.
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


class _Local(ShardedGradScaler):
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        GradScaler.unscale_(self, optimizer)


@mutant(after="pytorch/pytorch#115710", trace=Trace.STATE)
class KeepsOverflowLocal(FullyShardedDataParallelEngine):
    """A rank skips a step by itself when its gradients are infinite."""

    names = replace(NAMES, ShardedGradScaler=_Local)


@mutant(after="NVIDIA/Megatron-LM#3023", phase="backward")
class DividesWrappedGradientsTwice(FullyShardedDataParallelEngine):
    """Wrapped gradients are divided by the number of ranks twice."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        return dividing_losses(super().prepare(model, plan, mesh), mesh.size())


@mutant(after="Haian-Jin/LVSM#22", trace=Trace.COMMUNICATION)
class ReducesDespiteNoSync(FullyShardedDataParallelEngine):
    """Wrapped microbatches are all reduced although no_sync is on."""

    spoil = holding_nothing_back


def _forget(*_: object) -> None:
    pass


@mutant(after="pytorch/pytorch#98419", phase="step")
class StepsNotInBackward(FullyShardedDataParallelEngine):
    """Optimizers that are to step in backward never step."""

    names = replace(NAMES, optimizer_in_backward=_forget)
