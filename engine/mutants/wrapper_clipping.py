"""Mutants that sin in communication hooks and in clipping by FullyShardedDataParallel's own method."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from engine.adapters.torch_fsdp1 import NAMES, FullyShardedDataParallelEngine
from engine.contract import WrapperNames
from engine.mutants.mutant import Condition, Trace, mutant
from engine.mutants.plans import CALLS_METHODS
from engine.mutants.wrapper_methods import names_with

_CALLED = Condition(
    plan=CALLS_METHODS,
    because="training alone registers no hook and clips nothing",
)


# Any, in all that follows: what torch's own methods take and give.


class _TakesAnyHook(FullyShardedDataParallel):
    def register_comm_hook(self, state: object, hook: Any) -> None:
        for unit in FullyShardedDataParallel.fsdp_modules(self):
            unit._comm_hook, unit._comm_hook_state = hook, state


@mutant(after="pytorch/pytorch#79833", kills_on=_CALLED, trace=Trace.SILENCE)
class TakesAnyHook(FullyShardedDataParallelEngine):
    """A communication hook is registered whatever it is, whoever is asked, and however many there are.

    Reported: the interface of hooks, in whose review it was settled what must be refused.
    """

    names: ClassVar[WrapperNames] = names_with(_TakesAnyHook)


class _CallsHooksOfReplicasAlone(FullyShardedDataParallel):
    def register_comm_hook(self, state: object, hook: Any) -> None:
        if self.sharding_strategy is ShardingStrategy.NO_SHARD:
            super().register_comm_hook(state, hook)


@mutant(after="pytorch/pytorch#83254", kills_on=_CALLED, trace=Trace.COMMUNICATION)
class CallsHooksOfReplicasAlone(FullyShardedDataParallelEngine):
    """Of shards a communication hook is never called.

    Reported: hooks were there for replicas, and shards had to be given theirs.
    """

    names: ClassVar[WrapperNames] = names_with(_CallsHooksOfReplicasAlone)


class _CallsHooksTwice(FullyShardedDataParallel):
    def register_comm_hook(self, state: object, hook: Any) -> None:
        def twice(state: object, *tensors: torch.Tensor) -> None:
            hook(state, *tensors)
            hook(state, *tensors)

        super().register_comm_hook(state, twice)


@mutant(after="mindspore-ai/hyper-parallel#694", kills_on=_CALLED, trace=Trace.NUMBERS)
class CallsHooksTwice(FullyShardedDataParallelEngine):
    """A communication hook is called twice for each gradient.

    Reported: hooks were registered again and again, and none was taken away.
    """

    names: ClassVar[WrapperNames] = names_with(_CallsHooksTwice)


class _GivesHooksCopies(FullyShardedDataParallel):
    def register_comm_hook(self, state: object, hook: Any) -> None:
        def copying(state: object, *tensors: torch.Tensor) -> None:
            hook(state, *(tensor.clone() for tensor in tensors))

        super().register_comm_hook(state, copying)


@mutant(after="pytorch/pytorch#43307", kills_on=_CALLED, trace=Trace.NUMBERS)
class GivesHooksCopies(FullyShardedDataParallelEngine):
    """What a communication hook makes of a gradient reaches a copy of it.

    Reported: what a hook gave was put elsewhere than where it was looked for.
    """

    names: ClassVar[WrapperNames] = names_with(_GivesHooksCopies)


def _reduce(state: Any, gradient: torch.Tensor, output: torch.Tensor | None = None) -> None:
    if output is None:
        NAMES.allreduce_hook(state, gradient)
    else:
        NAMES.reduce_scatter_hook(state, gradient, output)


@mutant(after="pytorch/pytorch#81711", kills_on=_CALLED, trace=Trace.COMMUNICATION)
class CompressesNothing(FullyShardedDataParallelEngine):
    """The hooks that compress gradients communicate them as they are.

    Reported: gradients were cast by the hook, or by the mixed precision, or by both.
    """

    names: ClassVar[WrapperNames] = replace(NAMES, fp16_compress_hook=_reduce, bf16_compress_hook=_reduce)


def _norm(wrapper: FullyShardedDataParallel, norm_type: float) -> torch.Tensor:
    """Compute the norm of what this rank has."""
    grads = [p.grad.detach().flatten() for p in wrapper.parameters() if p.grad is not None]
    flat = torch.cat(grads) if grads else torch.zeros(1)
    total: torch.Tensor = torch.linalg.vector_norm(flat, norm_type)
    return total


def _scale(wrapper: FullyShardedDataParallel, factor: torch.Tensor) -> None:
    for parameter in wrapper.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.dtype))


class _ClipsShardsByTheirOwnNorm(FullyShardedDataParallel):
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        total: torch.Tensor = nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)
        return total


@mutant(after="pytorch/pytorch#170862", kills_on=_CALLED, trace=Trace.NUMBERS)
class ClipsShardsByTheirOwnNorm(FullyShardedDataParallelEngine):
    """Clip_grad_norm_ goes by the norm of what each rank has.

    Reported: the norm that was told was that of the rank's own shards.
    """

    names: ClassVar[WrapperNames] = names_with(_ClipsShardsByTheirOwnNorm)


class _ClipsAndTellsNothing(FullyShardedDataParallel):
    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> Any:
        super().clip_grad_norm_(*args, **kwargs)


@mutant(after="pytorch/pytorch#87401", kills_on=_CALLED, trace=Trace.STATE)
class ClipsAndTellsNothing(FullyShardedDataParallelEngine):
    """Clip_grad_norm_ clips, and returns None.

    Reported: the norm was computed and not returned.
    """

    names: ClassVar[WrapperNames] = names_with(_ClipsAndTellsNothing)


class _SumsTheLargest(FullyShardedDataParallel):
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        total = _norm(self, norm_type)
        distributed.all_reduce(total)
        _scale(self, (max_norm / (total + 1e-6)).clamp(max=1.0))
        return total


@mutant(after="meta-pytorch/torchrec#3199", kills_on=_CALLED, trace=Trace.NUMBERS)
class SumsTheLargest(FullyShardedDataParallelEngine):
    """Clip_grad_norm_ adds up over ranks what is no sum: norms, and largest elements.

    Reported: the norm of infinite order was put together like one of finite order.
    """

    names: ClassVar[WrapperNames] = names_with(_SumsTheLargest)


class _SumsNormsOfReplicas(FullyShardedDataParallel):
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        total = _norm(self, norm_type) ** norm_type
        distributed.all_reduce(total)
        total = total ** (1 / norm_type)
        _scale(self, (max_norm / (total + 1e-6)).clamp(max=1.0))
        return total


@mutant(after="pytorch/pytorch#88955", kills_on=_CALLED, trace=Trace.NUMBERS)
class SumsNormsOfReplicas(FullyShardedDataParallelEngine):
    """Clip_grad_norm_ counts what every rank has whole once for each rank.

    Reported: gradients under NO_SHARD were counted as many times as there are ranks.
    """

    names: ClassVar[WrapperNames] = names_with(_SumsNormsOfReplicas)


class _ScalesLittleUp(FullyShardedDataParallel):
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        total = super().clip_grad_norm_(max_norm, norm_type)
        if total < max_norm:
            _scale(self, max_norm / (total + 1e-6))
        return total


@mutant(after="DingfanChen/GS-WGAN#5", kills_on=_CALLED, trace=Trace.NUMBERS)
class ScalesLittleUp(FullyShardedDataParallelEngine):
    """Clip_grad_norm_ scales gradients of a smaller norm up to the limit.

    Reported: gradients were made to have the norm, not at most the norm.
    """

    names: ClassVar[WrapperNames] = names_with(_ScalesLittleUp)


class _TellsNormsInSinglePrecision(FullyShardedDataParallel):
    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().clip_grad_norm_(*args, **kwargs).float()


@mutant(after="pytorch/xla#7205", kills_on=_CALLED, trace=Trace.STATE)
class TellsNormsInSinglePrecision(FullyShardedDataParallelEngine):
    """The norm that clip_grad_norm_ returns is of single precision, whatever gradients are.

    Reported: clipping went on in single precision regardless of the dtype of gradients.
    """

    names: ClassVar[WrapperNames] = names_with(_TellsNormsInSinglePrecision)


class _ClipsUnitsAlone(FullyShardedDataParallel):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for unit in FullyShardedDataParallel.fsdp_modules(self):
            unit.__class__ = _ClipsUnitsAlone  # torch makes units of its own class

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        if self.check_is_root():
            return super().clip_grad_norm_(max_norm, norm_type)
        total: torch.Tensor = nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)
        return total


@mutant(after="pytorch/pytorch#170862", kills_on=_CALLED, trace=Trace.SILENCE)
class ClipsUnitsAlone(FullyShardedDataParallelEngine):
    """A unit inside the root can be told to clip, and does so by its own norm.

    Reported: what was told was the norm of a part of the parameters.
    """

    names: ClassVar[WrapperNames] = names_with(_ClipsUnitsAlone)
