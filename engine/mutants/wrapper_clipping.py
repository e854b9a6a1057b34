"""Mutants that sin in communication hooks and in clipping by FullyShardedDataParallel's own method."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from engine.adapters.torch_fsdp1 import NAMES, FullyShardedDataParallelEngine
from engine.contract import WrapperNames
from engine.mutants.wrapper_methods import names_with

__all__ = [
    "CallsHooksOfReplicasAlone",
    "CallsHooksTwice",
    "ClipsAndTellsNothing",
    "ClipsShardsByTheirOwnNorm",
    "ClipsUnitsAlone",
    "CompressesNothing",
    "GivesHooksCopies",
    "ScalesLittleUp",
    "SumsNormsOfReplicas",
    "SumsTheLargest",
    "TakesAnyHook",
    "TellsNormsInSinglePrecision",
]

# Any, in all that follows: what torch's own methods take and give.


class _TakesAnyHook(FullyShardedDataParallel):
    def register_comm_hook(self, state: object, hook: Any) -> None:
        for unit in FullyShardedDataParallel.fsdp_modules(self):
            unit._comm_hook, unit._comm_hook_state = hook, state


class TakesAnyHook(FullyShardedDataParallelEngine):
    """A communication hook is registered whatever it is, whoever is asked, and however many there are.

    After pytorch/pytorch#79833: the interface of hooks, in whose review it was settled what must be refused.
    """

    name = "mutant.TakesAnyHook"
    names: ClassVar[WrapperNames] = names_with(_TakesAnyHook)


class _CallsHooksOfReplicasAlone(FullyShardedDataParallel):
    def register_comm_hook(self, state: object, hook: Any) -> None:
        if self.sharding_strategy is ShardingStrategy.NO_SHARD:
            super().register_comm_hook(state, hook)


class CallsHooksOfReplicasAlone(FullyShardedDataParallelEngine):
    """Of shards a communication hook is never called.

    After pytorch/pytorch#83254: hooks were there for replicas, and shards had to be given theirs.
    """

    name = "mutant.CallsHooksOfReplicasAlone"
    names: ClassVar[WrapperNames] = names_with(_CallsHooksOfReplicasAlone)


class _CallsHooksTwice(FullyShardedDataParallel):
    def register_comm_hook(self, state: object, hook: Any) -> None:
        def twice(state: object, *tensors: torch.Tensor) -> None:
            hook(state, *tensors)
            hook(state, *tensors)

        super().register_comm_hook(state, twice)


class CallsHooksTwice(FullyShardedDataParallelEngine):
    """A communication hook is called twice for each gradient.

    After mindspore-ai/hyper-parallel#694: hooks were registered again and again, and none was taken away.
    """

    name = "mutant.CallsHooksTwice"
    names: ClassVar[WrapperNames] = names_with(_CallsHooksTwice)


class _GivesHooksCopies(FullyShardedDataParallel):
    def register_comm_hook(self, state: object, hook: Any) -> None:
        def copying(state: object, *tensors: torch.Tensor) -> None:
            hook(state, *(tensor.clone() for tensor in tensors))

        super().register_comm_hook(state, copying)


class GivesHooksCopies(FullyShardedDataParallelEngine):
    """What a communication hook makes of a gradient reaches a copy of it.

    After pytorch/pytorch#43307: what a hook gave was put elsewhere than where it was looked for.
    """

    name = "mutant.GivesHooksCopies"
    names: ClassVar[WrapperNames] = names_with(_GivesHooksCopies)


def _reduce(state: Any, gradient: torch.Tensor, output: torch.Tensor | None = None) -> None:
    if output is None:
        NAMES.allreduce_hook(state, gradient)
    else:
        NAMES.reduce_scatter_hook(state, gradient, output)


class CompressesNothing(FullyShardedDataParallelEngine):
    """The hooks that compress gradients communicate them as they are.

    After pytorch/pytorch#81711: gradients were cast by the hook, or by the mixed precision, or by both.
    """

    name = "mutant.CompressesNothing"
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


class ClipsShardsByTheirOwnNorm(FullyShardedDataParallelEngine):
    """``clip_grad_norm_`` goes by the norm of what each rank has.

    After pytorch/pytorch#170862: the norm that was told was that of the rank's own shards.
    """

    name = "mutant.ClipsShardsByTheirOwnNorm"
    names: ClassVar[WrapperNames] = names_with(_ClipsShardsByTheirOwnNorm)


class _ClipsAndTellsNothing(FullyShardedDataParallel):
    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> Any:
        super().clip_grad_norm_(*args, **kwargs)


class ClipsAndTellsNothing(FullyShardedDataParallelEngine):
    """``clip_grad_norm_`` clips, and returns None.

    After pytorch/pytorch#87401: the norm was computed and not returned.
    """

    name = "mutant.ClipsAndTellsNothing"
    names: ClassVar[WrapperNames] = names_with(_ClipsAndTellsNothing)


class _SumsTheLargest(FullyShardedDataParallel):
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        total = _norm(self, norm_type)
        distributed.all_reduce(total)
        _scale(self, (max_norm / (total + 1e-6)).clamp(max=1.0))
        return total


class SumsTheLargest(FullyShardedDataParallelEngine):
    """``clip_grad_norm_`` adds up over ranks what is no sum: norms, and largest elements.

    After meta-pytorch/torchrec#3199: the norm of infinite order was put together like one of finite order.
    """

    name = "mutant.SumsTheLargest"
    names: ClassVar[WrapperNames] = names_with(_SumsTheLargest)


class _SumsNormsOfReplicas(FullyShardedDataParallel):
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        total = _norm(self, norm_type) ** norm_type
        distributed.all_reduce(total)
        total = total ** (1 / norm_type)
        _scale(self, (max_norm / (total + 1e-6)).clamp(max=1.0))
        return total


class SumsNormsOfReplicas(FullyShardedDataParallelEngine):
    """``clip_grad_norm_`` counts what every rank has whole once for each rank.

    After pytorch/pytorch#88955: gradients under NO_SHARD were counted as many times as there are ranks.
    """

    name = "mutant.SumsNormsOfReplicas"
    names: ClassVar[WrapperNames] = names_with(_SumsNormsOfReplicas)


class _ScalesLittleUp(FullyShardedDataParallel):
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        total = super().clip_grad_norm_(max_norm, norm_type)
        if total < max_norm:
            _scale(self, max_norm / (total + 1e-6))
        return total


class ScalesLittleUp(FullyShardedDataParallelEngine):
    """``clip_grad_norm_`` scales gradients of a smaller norm up to the limit.

    After DingfanChen/GS-WGAN#5: gradients were made to have the norm, not at most the norm.
    """

    name = "mutant.ScalesLittleUp"
    names: ClassVar[WrapperNames] = names_with(_ScalesLittleUp)


class _TellsNormsInSinglePrecision(FullyShardedDataParallel):
    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().clip_grad_norm_(*args, **kwargs).float()


class TellsNormsInSinglePrecision(FullyShardedDataParallelEngine):
    """The norm that ``clip_grad_norm_`` returns is of single precision, whatever gradients are.

    After pytorch/xla#7205: clipping went on in single precision regardless of the dtype of gradients.
    """

    name = "mutant.TellsNormsInSinglePrecision"
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


class ClipsUnitsAlone(FullyShardedDataParallelEngine):
    """A unit inside the root can be told to clip, and does so by its own norm.

    After pytorch/pytorch#170862: what was told was the norm of a part of the parameters.
    """

    name = "mutant.ClipsUnitsAlone"
    names: ClassVar[WrapperNames] = names_with(_ClipsUnitsAlone)
