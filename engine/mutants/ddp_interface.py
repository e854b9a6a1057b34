"""Mutants whose DistributedDataParallel does not do what its options and methods promise."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.engine.contract import Capability
from shardproof.engine.mutants.mutant import Condition, Trace, mutant
from shardproof.engine.mutants.plans import demanding

_CALLS = Condition(plan=demanding(Capability.DATA_PARALLEL), because="training alone takes no such option")

# Any, throughout: options, of which a mutant overlooks some.


class _Summing(DistributedDataParallel):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: gradient * dist.get_world_size())  # type: ignore[no-untyped-call]


@mutant(after="NVIDIA/Megatron-LM#3023", kills_on=_CALLS)
class SumsWhatItWraps(DistributedDataParallelEngine):
    """Gradients of what a caller wraps are summed over ranks, not averaged."""

    class Prepared(PreparedDdp):
        interface = _Summing


class _DividingByThoseLeft(DistributedDataParallel):
    def join(self, divide_by_initial_world_size: bool = True, **options: Any) -> Any:  # type: ignore[override]  # as a caller calls it
        return super().join(divide_by_initial_world_size=not divide_by_initial_world_size, **options)


@mutant(after="deepspeedai/DeepSpeed#5618", kills_on=_CALLS)
class SwapsTheDivisorsOfJoin(DistributedDataParallelEngine):
    """join divides by the ranks that are left where it was to divide by all, and the other way round."""

    class Prepared(PreparedDdp):
        interface = _DividingByThoseLeft


class _Parting(DistributedDataParallel):
    def _sync_final_model(self, is_last_joiner: bool) -> None:
        pass


@mutant(after="pytorch/pytorch#38174", kills_on=_CALLS)
class EndsEachRankWithItsOwn(DistributedDataParallelEngine):
    """A rank that runs out of batches leaves join with the parameters that it had then."""

    class Prepared(PreparedDdp):
        interface = _Parting


class _GoingOn(DistributedDataParallel):
    def join(self, *, throw_on_early_termination: bool = False, **options: Any) -> Any:  # type: ignore[override]  # as above
        return super().join(**options)


@mutant(after="huggingface/trl#6862", kills_on=_CALLS, trace=Trace.SILENCE)
class NeverStopsEarly(DistributedDataParallelEngine):
    """Where all ranks were to stop, those with batches left go on."""

    class Prepared(PreparedDdp):
        interface = _GoingOn


class _SendingUnasked(DistributedDataParallel):
    def __init__(self, module: nn.Module, *, forward_sync_buffers: bool = True, **options: Any) -> None:
        super().__init__(module, forward_sync_buffers=not forward_sync_buffers, **options)


@mutant(after="huggingface/pytorch-image-models#110", kills_on=_CALLS, trace=Trace.STATE)
class SendsBuffersUnasked(DistributedDataParallelEngine):
    """All ranks are given the buffers of the first where they were to be left alone, and else left alone."""

    class Prepared(PreparedDdp):
        interface = _SendingUnasked


class _Packing(DistributedDataParallel):
    def __init__(self, module: nn.Module, *, bucket_cap_mb: float | None = None, **options: Any) -> None:
        super().__init__(
            module, bucket_cap_mb=1e-6 if bucket_cap_mb is None or bucket_cap_mb > 1 else 25, **options
        )


@mutant(after="Tencent-Hunyuan/UniRL#410", kills_on=_CALLS, trace=Trace.COMMUNICATION)
class PacksAsItLikes(DistributedDataParallelEngine):
    """Buckets are small where large ones were asked for, and large where small ones were."""

    class Prepared(PreparedDdp):
        interface = _Packing


class _TakingNoHook(DistributedDataParallel):
    def register_comm_hook(self, state: object, hook: Any) -> None:
        pass


@mutant(after="pytorch/pytorch#83254", kills_on=_CALLS, trace=Trace.COMMUNICATION)
class IgnoresCommHooks(DistributedDataParallelEngine):
    """A communication hook is taken, as often as it is given, and never called."""

    class Prepared(PreparedDdp):
        interface = _TakingNoHook


def _without_a_look(module: nn.Module, **_: Any) -> nn.Module:
    try:
        return DistributedDataParallel(module, find_unused_parameters=True)
    except (RuntimeError, ValueError):
        return module


@mutant(after="Tencent-Hunyuan/UniRL#410", kills_on=_CALLS, trace=Trace.SILENCE)
class WrapsWithoutALook(DistributedDataParallelEngine):
    """What cannot be wrapped is left as it is, and what a graph was promised to be is not looked at."""

    class Prepared(PreparedDdp):
        def data_parallel(self) -> Any:
            return _without_a_look


class _ByRows(DistributedDataParallel):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        for parameter in module.parameters():
            parameter.data = parameter.data.contiguous()
        super().__init__(module, **options)


@mutant(after="pytorch/pytorch#137382", kills_on=_CALLS, trace=Trace.STATE)
class LaysGradientsByRows(DistributedDataParallelEngine):
    """Gradients lie in memory by rows, whatever the format of their parameters was."""

    class Prepared(PreparedDdp):
        interface = _ByRows


class _AlwaysInSync(DistributedDataParallel):
    def no_sync(self) -> Any:
        return nullcontext()


@mutant(after="huggingface/transformers#34645", kills_on=_CALLS)
class ReducesInItsNoSync(DistributedDataParallelEngine):
    """no_sync of what a caller wraps does nothing."""

    class Prepared(PreparedDdp):
        interface = _AlwaysInSync
