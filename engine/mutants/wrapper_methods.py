"""Mutants that sin in how a module in FullyShardedDataParallel is reached, named, applied to, called and converted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from engine.adapters.torch_fsdp1 import NAMES, FullyShardedDataParallelEngine
from engine.contract import WrapperNames
from engine.mutants.mutant import Condition, Trace, mutant
from engine.mutants.plans import CALLS_METHODS

_CALLED = Condition(plan=CALLS_METHODS, because="training alone calls no such method")


_PREFIX = "_fsdp_wrapped_module."

# Any, in all that follows: what torch's own methods take and give.


def names_with(wrapper: type[FullyShardedDataParallel]) -> WrapperNames:
    """Put a sinner in the wrapper's place, among names that are torch's otherwise."""
    return replace(NAMES, FullyShardedDataParallel=wrapper)


class _WrapsItsModuleAgain(FullyShardedDataParallel):
    @property
    def module(self) -> nn.Module:
        return nn.Sequential(super().module)


@mutant(after="pytorch/pytorch#87950", kills_on=_CALLED, trace=Trace.STATE)
class WrapsItsModuleAgain(FullyShardedDataParallelEngine):
    """What module gives is not what was wrapped, but a module around it.

    Reported: of a module that another wrapper was put around, ``module`` gave that wrapper.
    """

    names: ClassVar[WrapperNames] = names_with(_WrapsItsModuleAgain)


class _HidesAttributes(FullyShardedDataParallel):
    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if name.startswith("_") or isinstance(found, nn.Module | torch.Tensor):
            return found
        raise AttributeError(name)


@mutant(after="pytorch/pytorch#83351", kills_on=_CALLED, trace=Trace.STATE)
class HidesAttributes(FullyShardedDataParallelEngine):
    """Submodules and tensors are found through the wrapper, plain attributes and methods are not.

    Reported: some of what a plain module offers did not work through a wrapper.
    """

    names: ClassVar[WrapperNames] = names_with(_HidesAttributes)


class _CountsItemsFromOne(FullyShardedDataParallel):
    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key - 1 if isinstance(key, int) and key > 0 else key)


@mutant(after="pytorch/pytorch#83351", kills_on=_CALLED, trace=Trace.STATE)
class CountsItemsFromOne(FullyShardedDataParallelEngine):
    """An index is passed on to the wrapped list less by one.

    Reported: some of what a plain module offers did not work through a wrapper.
    """

    names: ClassVar[WrapperNames] = names_with(_CountsItemsFromOne)


class _KnowsNoRootBeforeForward(FullyShardedDataParallel):
    def check_is_root(self) -> bool:
        was_asked = self.__dict__.get("was_asked", False)
        self.__dict__["was_asked"] = True
        return super().check_is_root() and was_asked


@mutant(after="facebookresearch/fairscale#490", kills_on=_CALLED, trace=Trace.STATE)
class KnowsNoRootBeforeForward(FullyShardedDataParallelEngine):
    """Nobody is told to be the root who asks for the first time.

    Reported: who the root is was found out too early or too late, by whoever came first.
    """

    names: ClassVar[WrapperNames] = names_with(_KnowsNoRootBeforeForward)


class _TakesUnitsForRoots(FullyShardedDataParallel):
    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        return FullyShardedDataParallel.fsdp_modules(module)


@mutant(after="facebookresearch/fairscale#490", kills_on=_CALLED, trace=Trace.STATE)
class TakesUnitsForRoots(FullyShardedDataParallelEngine):
    """Asked for roots alone, all units are listed.

    Reported: units inside the root were marked as roots themselves.
    """

    names: ClassVar[WrapperNames] = names_with(_TakesUnitsForRoots)


class _AppliesToShards(FullyShardedDataParallel):
    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        return nn.Module.apply(self, fn)


@mutant(after="facebookresearch/fairscale#543", kills_on=_CALLED, trace=Trace.STATE)
class AppliesToShards(FullyShardedDataParallelEngine):
    """Apply gathers nothing: functions see what each rank has.

    Reported: weights were to be initialised by ``apply``, and it showed shards.
    """

    names: ClassVar[WrapperNames] = names_with(_AppliesToShards)


class _ForgetsWhatWasApplied(FullyShardedDataParallel):
    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        with FullyShardedDataParallel.summon_full_params(self, writeback=False):
            for module in self.modules():
                fn(module)
        return self


@mutant(after="pytorch/pytorch#107081", kills_on=_CALLED, trace=Trace.STATE)
class ForgetsWhatWasApplied(FullyShardedDataParallelEngine):
    """What functions do to whole parameters in apply is not written back.

    Reported: parameters were as before once their context had ended.
    """

    names: ClassVar[WrapperNames] = names_with(_ForgetsWhatWasApplied)


class _AppliesInSilence(FullyShardedDataParallel):
    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        try:
            return super().apply(fn)
        except (AssertionError, ValueError):
            return self


@mutant(after="Lightning-AI/pytorch-lightning#19755", kills_on=_CALLED, trace=Trace.SILENCE)
class AppliesInSilence(FullyShardedDataParallelEngine):
    """Where apply is refused, it does nothing and says nothing.

    Reported: ``apply`` was called where nobody meant its whole parameters.
    """

    names: ClassVar[WrapperNames] = names_with(_AppliesInSilence)


class _DropsKeywords(FullyShardedDataParallel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **{k: v for k, v in kwargs.items() if not isinstance(v, int)})


@mutant(after="pytorch/pytorch#147531", kills_on=_CALLED, trace=Trace.STATE)
class DropsKeywords(FullyShardedDataParallelEngine):
    """Of the keywords of forward, plain numbers are dropped.

    Reported: what forward was called with was lost where there was nothing to move.
    """

    names: ClassVar[WrapperNames] = names_with(_DropsKeywords)


class _KeepsItsPrefixInside(FullyShardedDataParallel):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return nn.Module.named_parameters(self, *args, **kwargs)


@mutant(after="pytorch/pytorch#83351", kills_on=_CALLED, trace=Trace.STATE)
class KeepsItsPrefixInside(FullyShardedDataParallelEngine):
    """Names of parameters tell of the wrapper wherever one asks.

    Reported: code that relies on names of parameters met those of the wrapper.
    """

    names: ClassVar[WrapperNames] = names_with(_KeepsItsPrefixInside)


class _StripsItsPrefixAlways(FullyShardedDataParallel):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name.replace(_PREFIX, ""), parameter


@mutant(after="pytorch/pytorch#83351", kills_on=_CALLED, trace=Trace.STATE)
class StripsItsPrefixAlways(FullyShardedDataParallelEngine):
    """Names of parameters hide the wrapper even where what they name is a shard.

    Reported: names inside and outside ``summon_full_params`` were to be told apart.
    """

    names: ClassVar[WrapperNames] = names_with(_StripsItsPrefixAlways)


class _KeepsItsPrefixOfBuffersInside(FullyShardedDataParallel):
    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return nn.Module.named_buffers(self, *args, **kwargs)


@mutant(after="pytorch/pytorch#83351", kills_on=_CALLED, trace=Trace.STATE)
class KeepsItsPrefixOfBuffersInside(FullyShardedDataParallelEngine):
    """Names of buffers tell of the wrapper wherever one asks.

    Reported: code that relies on names of buffers met those of the wrapper.
    """

    names: ClassVar[WrapperNames] = names_with(_KeepsItsPrefixOfBuffersInside)


class _CastsInputsInsteadOfItself(FullyShardedDataParallel):
    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        dtype = next(self.parameters()).dtype
        return super().forward(*(a.to(dtype) if a.is_floating_point() else a for a in args), **kwargs)


@mutant(after="pytorch/pytorch#90838", kills_on=_CALLED, trace=Trace.STATE)
class CastsInputsInsteadOfItself(FullyShardedDataParallelEngine):
    """A conversion once wrapped changes nothing; inputs are cast to what the model was made in.

    Reported: the dtype that parameters had in the constructor was gone by for ever.
    """

    names: ClassVar[WrapperNames] = names_with(_CastsInputsInsteadOfItself)
