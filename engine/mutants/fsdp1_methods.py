"""Mutants of FSDP1's methods: access, names, `apply`, conversion, communication hooks and clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from shardproof.engine.adapters.torch_fsdp1 import NAMES, FullyShardedDataParallelEngine
from shardproof.engine.mutants.mutant import Trace, mutant

_PREFIX = "_fsdp_wrapped_module."

# Any, throughout: arguments and results of torch's own methods.


@mutant(after="pytorch/pytorch#87950", trace=Trace.STATE)
class WrapsItsModuleAgain(FullyShardedDataParallelEngine):
    """The attribute module is not the wrapped module, but one around it."""

    class Wrapper(FullyShardedDataParallel):
        @property
        def module(self) -> nn.Module:
            return nn.Sequential(super().module)


@mutant(after="pytorch/pytorch#83351", trace=Trace.STATE)
class HidesAttributes(FullyShardedDataParallelEngine):
    """The wrapper forwards submodules and tensors of its module, but not plain attributes and methods."""

    class Wrapper(FullyShardedDataParallel):
        def __getattr__(self, name: str) -> Any:
            found = super().__getattr__(name)
            if name.startswith("_") or isinstance(found, nn.Module | torch.Tensor):
                return found
            raise AttributeError(name)


@mutant(after="pytorch/pytorch#83351", trace=Trace.STATE)
class CountsItemsFromOne(FullyShardedDataParallelEngine):
    """An index is passed on to the wrapped list decreased by one."""

    class Wrapper(FullyShardedDataParallel):
        def __getitem__(self, key: Any) -> Any:
            return super().__getitem__(key - 1 if isinstance(key, int) and key > 0 else key)


@mutant(after="facebookresearch/fairscale#490", trace=Trace.STATE)
class KnowsNoRootBeforeForward(FullyShardedDataParallelEngine):
    """`check_is_root` returns False on its first call."""

    class Wrapper(FullyShardedDataParallel):
        def check_is_root(self) -> bool:
            was_asked = self.__dict__.get("was_asked", False)
            self.__dict__["was_asked"] = True
            return super().check_is_root() and was_asked


@mutant(after="facebookresearch/fairscale#490", trace=Trace.STATE)
class TakesUnitsForRoots(FullyShardedDataParallelEngine):
    """Given root_only, fsdp_modules lists all units."""

    class Wrapper(FullyShardedDataParallel):
        @staticmethod
        def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
            return FullyShardedDataParallel.fsdp_modules(module)


@mutant(after="facebookresearch/fairscale#543", trace=Trace.STATE)
class AppliesToShards(FullyShardedDataParallelEngine):
    """apply does not gather: functions receive each rank's shards."""

    class Wrapper(FullyShardedDataParallel):
        def apply(self, fn: Callable[[nn.Module], None]) -> Any:
            return nn.Module.apply(self, fn)


@mutant(after="pytorch/pytorch#107081", trace=Trace.STATE)
class ForgetsWhatWasApplied(FullyShardedDataParallelEngine):
    """Writes to whole parameters in apply are not written back."""

    class Wrapper(FullyShardedDataParallel):
        def apply(self, fn: Callable[[nn.Module], None]) -> Any:
            with FullyShardedDataParallel.summon_full_params(self, writeback=False):
                for module in self.modules():
                    fn(module)
            return self


@mutant(after="Lightning-AI/pytorch-lightning#19755", trace=Trace.SILENCE)
class AppliesInSilence(FullyShardedDataParallelEngine):
    """If apply must raise, it silently does nothing."""

    class Wrapper(FullyShardedDataParallel):
        def apply(self, fn: Callable[[nn.Module], None]) -> Any:
            try:
                return super().apply(fn)
            except (AssertionError, ValueError):
                return self


@mutant(after="pytorch/pytorch#147531", trace=Trace.STATE)
class DropsKeywords(FullyShardedDataParallelEngine):
    """forward drops keyword arguments that are plain numbers."""

    class Wrapper(FullyShardedDataParallel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **{k: v for k, v in kwargs.items() if not isinstance(v, int)})


@mutant(after="pytorch/pytorch#83351", trace=Trace.STATE)
class KeepsItsPrefixInside(FullyShardedDataParallelEngine):
    """Names of parameters contain the wrapper's prefix inside ``summon_full_params`` too."""

    class Wrapper(FullyShardedDataParallel):
        def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
            return nn.Module.named_parameters(self, *args, **kwargs)


@mutant(after="pytorch/pytorch#83351", trace=Trace.STATE)
class StripsItsPrefixAlways(FullyShardedDataParallelEngine):
    """Names of parameters hide the wrapper even where they name a shard."""

    class Wrapper(FullyShardedDataParallel):
        def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
            for name, parameter in super().named_parameters(*args, **kwargs):
                yield name.replace(_PREFIX, ""), parameter


@mutant(after="pytorch/pytorch#83351", trace=Trace.STATE)
class KeepsItsPrefixOfBuffersInside(FullyShardedDataParallelEngine):
    """Names of buffers contain the wrapper's prefix inside ``summon_full_params`` too."""

    class Wrapper(FullyShardedDataParallel):
        def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
            return nn.Module.named_buffers(self, *args, **kwargs)


@mutant(after="pytorch/pytorch#90838", trace=Trace.STATE)
class CastsInputsInsteadOfItself(FullyShardedDataParallelEngine):
    """A conversion after wrapping changes nothing; inputs are cast to the model's original dtype."""

    class Wrapper(FullyShardedDataParallel):
        def _apply(self, *args: Any, **kwargs: Any) -> Any:
            return self

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            dtype = next(self.parameters()).dtype
            return super().forward(*(a.to(dtype) if a.is_floating_point() else a for a in args), **kwargs)


@mutant(after="pytorch/pytorch#79833", trace=Trace.SILENCE)
class TakesAnyHook(FullyShardedDataParallelEngine):
    """A communication hook is registered whatever it is, on any unit, and in addition to others."""

    class Wrapper(FullyShardedDataParallel):
        def register_comm_hook(self, state: object, hook: Any) -> None:
            for unit in FullyShardedDataParallel.fsdp_modules(self):
                unit._comm_hook, unit._comm_hook_state = hook, state


@mutant(after="pytorch/pytorch#83254", trace=Trace.COMMUNICATION)
class CallsHooksOfReplicasAlone(FullyShardedDataParallelEngine):
    """For shards a communication hook is never called."""

    class Wrapper(FullyShardedDataParallel):
        def register_comm_hook(self, state: object, hook: Any) -> None:
            if self.sharding_strategy is ShardingStrategy.NO_SHARD:
                super().register_comm_hook(state, hook)


@mutant(after="mindspore-ai/hyper-parallel#694", trace=Trace.NUMBERS, phase="reduce")
class CallsHooksTwice(FullyShardedDataParallelEngine):
    """A communication hook is called twice for each gradient."""

    class Wrapper(FullyShardedDataParallel):
        def register_comm_hook(self, state: object, hook: Any) -> None:
            def twice(state: object, *tensors: torch.Tensor) -> None:
                hook(state, *tensors)
                hook(state, *tensors)

            super().register_comm_hook(state, twice)


@mutant(after="pytorch/pytorch#43307", trace=Trace.NUMBERS, phase="reduce")
class GivesHooksCopies(FullyShardedDataParallelEngine):
    """A communication hook changes only a copy of the gradient."""

    class Wrapper(FullyShardedDataParallel):
        def register_comm_hook(self, state: object, hook: Any) -> None:
            def copying(state: object, *tensors: torch.Tensor) -> None:
                hook(state, *(tensor.clone() for tensor in tensors))

            super().register_comm_hook(state, copying)


def _reduce(state: Any, gradient: torch.Tensor, output: torch.Tensor | None = None) -> None:
    if output is None:
        NAMES.allreduce_hook(state, gradient)
    else:
        NAMES.reduce_scatter_hook(state, gradient, output)


@mutant(after="pytorch/pytorch#81711", trace=Trace.COMMUNICATION)
class CompressesNothing(FullyShardedDataParallelEngine):
    """The hooks that compress gradients communicate them uncompressed."""

    names = replace(NAMES, fp16_compress_hook=_reduce, bf16_compress_hook=_reduce)


def _norm(wrapper: FullyShardedDataParallel, norm_type: float) -> torch.Tensor:
    grads = [p.grad.detach().flatten() for p in wrapper.parameters() if p.grad is not None]
    flat = torch.cat(grads) if grads else torch.zeros(1)
    total: torch.Tensor = torch.linalg.vector_norm(flat, norm_type)
    return total


def _clip(wrapper: FullyShardedDataParallel, max_norm: float, total: torch.Tensor) -> torch.Tensor:
    _scale(wrapper, (max_norm / (total + 1e-6)).clamp(max=1.0))
    return total


@torch.no_grad()
def _scale(wrapper: FullyShardedDataParallel, factor: torch.Tensor) -> None:
    for parameter in wrapper.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad.dtype))


@mutant(after="pytorch/pytorch#170862", trace=Trace.NUMBERS, phase="clip")
class ClipsShardsByTheirOwnNorm(FullyShardedDataParallelEngine):
    """clip_grad_norm_ uses the norm of each rank's own shards."""

    class Wrapper(FullyShardedDataParallel):
        def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
            total: torch.Tensor = nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)
            return total


@mutant(after="pytorch/pytorch#87401", trace=Trace.STATE)
class ClipsAndTellsNothing(FullyShardedDataParallelEngine):
    """clip_grad_norm_ clips, and returns None."""

    class Wrapper(FullyShardedDataParallel):
        def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> Any:
            super().clip_grad_norm_(*args, **kwargs)


@mutant(after="meta-pytorch/torchrec#3199", trace=Trace.NUMBERS, phase="clip")
class SumsTheLargest(FullyShardedDataParallelEngine):
    """clip_grad_norm_ adds values over ranks that are no sums: norms, and largest elements."""

    class Wrapper(FullyShardedDataParallel):
        def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
            total = _norm(self, norm_type)
            distributed.all_reduce(total)
            return _clip(self, max_norm, total)


@mutant(after="pytorch/pytorch#88955", trace=Trace.NUMBERS, phase="clip")
class SumsNormsOfReplicas(FullyShardedDataParallelEngine):
    """clip_grad_norm_ counts replicated parameters once for each rank."""

    class Wrapper(FullyShardedDataParallel):
        def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
            total = _norm(self, norm_type) ** norm_type
            distributed.all_reduce(total)
            return _clip(self, max_norm, total ** (1 / norm_type))


@mutant(after="DingfanChen/GS-WGAN#5", trace=Trace.NUMBERS, phase="clip")
class ScalesLittleUp(FullyShardedDataParallelEngine):
    """clip_grad_norm_ scales gradients of a smaller norm up to the limit."""

    class Wrapper(FullyShardedDataParallel):
        def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
            total = super().clip_grad_norm_(max_norm, norm_type)
            if total < max_norm:
                _scale(self, max_norm / (total + 1e-6))
            return total


@mutant(after="pytorch/xla#7205", trace=Trace.STATE)
class TellsNormsInSinglePrecision(FullyShardedDataParallelEngine):
    """The norm that clip_grad_norm_ returns has single precision, whatever dtype gradients have."""

    class Wrapper(FullyShardedDataParallel):
        def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return super().clip_grad_norm_(*args, **kwargs).float()


@mutant(after="pytorch/pytorch#170862", trace=Trace.SILENCE)
class ClipsUnitsAlone(FullyShardedDataParallelEngine):
    """A unit inside the root accepts a call to clip, and clips by its own norm."""

    class Wrapper(FullyShardedDataParallel):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for unit in FullyShardedDataParallel.fsdp_modules(self):
                unit.__class__ = type(self)  # torch makes units of its own class

        def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
            if self.check_is_root():
                return super().clip_grad_norm_(max_norm, norm_type)
            total: torch.Tensor = nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)
            return total
