"""Mutants whose DistributedDataParallel does not do what its options and methods promise."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardproof.engine.adapters.manual_finalization import ManualFinalizationEngine, ManuallyFinalized
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.engine.mutants.mutant import Trace, mutant

# Any, throughout: options, some of which a mutant ignores.


class _Summing(DistributedDataParallel):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: gradient * dist.get_world_size())  # type: ignore[no-untyped-call]


@mutant(after="NVIDIA/Megatron-LM#3023", phase="reduce")
class SumsWhatItWraps(DistributedDataParallelEngine):
    """Gradients of a module that a caller wraps are summed over ranks, not averaged."""

    class Prepared(PreparedDdp):
        interface = _Summing


class _DividingByThoseLeft(DistributedDataParallel):
    def join(self, divide_by_initial_world_size: bool = True, **options: Any) -> Any:  # type: ignore[override]  # as a caller calls it
        return super().join(divide_by_initial_world_size=not divide_by_initial_world_size, **options)


@mutant(after="deepspeedai/DeepSpeed#5618", phase="reduce")
class SwapsTheDivisorsOfJoin(DistributedDataParallelEngine):
    """join divides by the number of remaining ranks if it should divide by all, and the reverse."""

    class Prepared(PreparedDdp):
        interface = _DividingByThoseLeft


class _Unhooked(DistributedDataParallel):
    def _match_all_reduce_for_bwd_pass(self) -> None:
        buckets = [bucket.buffer() for bucket in self.reducer._get_zeros_like_grad_buckets()]
        for work in [dist.all_reduce(bucket, group=self.process_group, async_op=True) for bucket in buckets]:
            assert work is not None
            work.wait()


@mutant(after="pytorch/pytorch#60611", trace=Trace.COMMUNICATION)
class JoinsWithoutItsHook(DistributedDataParallelEngine):
    """A rank that runs out of batches follows the others by plain reductions, whatever hook they use."""

    class Prepared(PreparedDdp):
        interface = _Unhooked


class _Parting(DistributedDataParallel):
    def _sync_final_model(self, is_last_joiner: bool) -> None:
        pass


@mutant(after="pytorch/pytorch#38174", phase="step")
class EndsEachRankWithItsOwn(DistributedDataParallelEngine):
    """A rank that runs out of batches leaves join with the parameters that it had then."""

    class Prepared(PreparedDdp):
        interface = _Parting


class _Deaf(DistributedDataParallel):
    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> Any:
        super()._check_global_requires_backward_grad_sync(is_joined_rank)  # type: ignore[no-untyped-call]  # of torch's
        return True if is_joined_rank else None


@mutant(after="pytorch/pytorch#44425", trace=Trace.COMMUNICATION)
class ReducesForThoseInNoSync(DistributedDataParallelEngine):
    """A rank that has run out of batches takes part in reductions that the others, in no_sync, leave out."""

    class Prepared(PreparedDdp):
        interface = _Deaf


class _GoingOn(DistributedDataParallel):
    def join(self, *, throw_on_early_termination: bool = False, **options: Any) -> Any:  # type: ignore[override]  # as above
        return super().join(**options)


@mutant(after="huggingface/trl#6862", trace=Trace.SILENCE)
class NeverStopsEarly(DistributedDataParallelEngine):
    """If all ranks should stop, those with batches left continue."""

    class Prepared(PreparedDdp):
        interface = _GoingOn


class _SendingUnasked(DistributedDataParallel):
    def __init__(self, module: nn.Module, *, forward_sync_buffers: bool = True, **options: Any) -> None:
        super().__init__(module, forward_sync_buffers=not forward_sync_buffers, **options)


@mutant(after="huggingface/pytorch-image-models#110", trace=Trace.STATE)
class SendsBuffersUnasked(DistributedDataParallelEngine):
    """Buffers of the first rank are broadcast if they should not be, and not broadcast if they should."""

    class Prepared(PreparedDdp):
        interface = _SendingUnasked


class _Packing(DistributedDataParallel):
    def __init__(self, module: nn.Module, *, bucket_cap_mb: float | None = None, **options: Any) -> None:
        super().__init__(
            module, bucket_cap_mb=1e-6 if bucket_cap_mb is None or bucket_cap_mb > 1 else 25, **options
        )


@mutant(after="Tencent-Hunyuan/UniRL#410", trace=Trace.COMMUNICATION)
class PacksAsItLikes(DistributedDataParallelEngine):
    """Buckets are small if large ones are requested, and large if small ones are."""

    class Prepared(PreparedDdp):
        interface = _Packing


class _TakingNoHook(DistributedDataParallel):
    def register_comm_hook(self, state: object, hook: Any) -> None:
        pass


@mutant(after="pytorch/pytorch#83254", trace=Trace.COMMUNICATION)
class IgnoresCommHooks(DistributedDataParallelEngine):
    """A communication hook is accepted, any number of times, and never called."""

    class Prepared(PreparedDdp):
        interface = _TakingNoHook


def _without_a_look(module: nn.Module, **_: Any) -> nn.Module:
    try:
        return DistributedDataParallel(module, find_unused_parameters=True)
    except (RuntimeError, ValueError):
        return module


@mutant(after="Tencent-Hunyuan/UniRL#410", trace=Trace.SILENCE)
class WrapsWithoutALook(DistributedDataParallelEngine):
    """Modules that cannot be wrapped are accepted, and the promise of a static graph is not checked."""

    class Prepared(PreparedDdp):
        def data_parallel(self) -> Any:
            return _without_a_look


class _ByRows(DistributedDataParallel):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        for parameter in module.parameters():
            parameter.data = parameter.data.contiguous()
        super().__init__(module, **options)


@mutant(after="pytorch/pytorch#137382", trace=Trace.STATE)
class LaysGradientsByRows(DistributedDataParallelEngine):
    """Gradients are row-major in memory, whatever the format of their parameters is."""

    class Prepared(PreparedDdp):
        interface = _ByRows


class _AlwaysInSync(DistributedDataParallel):
    def no_sync(self) -> Any:
        return nullcontext()


@mutant(after="huggingface/transformers#34645", phase="hold")
class ReducesInItsNoSync(DistributedDataParallelEngine):
    """no_sync of a module that a caller wraps has no effect."""

    class Prepared(PreparedDdp):
        interface = _AlwaysInSync


class _ClearingViews(DistributedDataParallel):
    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self.require_backward_grad_sync and self.gradient_as_bucket_view:
            for parameter in self.module.parameters():
                parameter.grad = None
        return super().forward(*inputs, **named)  # type: ignore[no-untyped-call]


@mutant(after="hpcaitech/ColossalAI#2496", phase="hold")
class ClearsWhatIsHeldInBuckets(DistributedDataParallelEngine):
    """If gradients are views of buckets, those that no_sync held back are cleared before they are reduced."""

    class Prepared(PreparedDdp):
        interface = _ClearingViews


class _StaticForEver(DistributedDataParallel):
    def __init__(self, module: nn.Module, *, static_graph: bool = False, **options: Any) -> None:
        super().__init__(module, **options)
        self._is_static, self._num_forwards = static_graph, 0

    def forward(self, *inputs: Any, **named: Any) -> Any:
        self._num_forwards += 1
        if self._is_static and self._num_forwards > 1:
            self.require_backward_grad_sync = False
        return super().forward(*inputs, **named)  # type: ignore[no-untyped-call]


@mutant(after="pytorch/pytorch#143580", phase="reduce")
class CountsTheGraphOnceForAll(DistributedDataParallelEngine):
    """A static graph is reduced in the first backward, and never again."""

    class Prepared(PreparedDdp):
        interface = _StaticForEver


class _Unreduced(ManuallyFinalized):
    def reduce(self, gradients: list[torch.Tensor]) -> None:
        pass


@mutant(after="facebookresearch/fairscale#777", phase="reduce")
class EndsBackwardsUnreduced(ManualFinalizationEngine):
    """A backward that the caller finalizes is never reduced."""

    class Prepared(PreparedDdp):
        interface = _Unreduced


class _OnceMore(ManuallyFinalized):
    def reduce(self, gradients: list[torch.Tensor]) -> None:
        super().reduce(gradients)
        super().reduce(gradients)


@mutant(after="NVIDIA/cosmos-framework#161", trace=Trace.COMMUNICATION)
class ReducesOnceMoreAtTheEnd(ManualFinalizationEngine):
    """Reduced gradients are reduced again when the caller finalizes the backward."""

    class Prepared(PreparedDdp):
        interface = _OnceMore


class _Unchecked(ManuallyFinalized):
    def check(self, holds: bool, otherwise: str) -> None:
        pass


@mutant(after="pytorch/pytorch#104504", trace=Trace.SILENCE)
class EndsBackwardsWhateverComes(ManualFinalizationEngine):
    """Backwards are finalized without a call, twice, too early, while they are held back, and not at all."""

    class Prepared(PreparedDdp):
        interface = _Unchecked
