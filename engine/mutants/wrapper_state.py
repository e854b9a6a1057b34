"""Mutants that sin in state dicts of what FullyShardedDataParallel wraps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from engine.adapters.torch_fsdp1 import FullyShardedDataParallelEngine
from engine.contract import WrapperNames
from engine.mutants.mutant import Condition, Trace, mutant
from engine.mutants.plans import CALLS_METHODS
from engine.mutants.wrapper_methods import names_with

_CALLED = Condition(plan=CALLS_METHODS, because="training alone saves nothing")


# Any, in all that follows: what torch's own methods take and give.


def _kind(wrapper: FullyShardedDataParallel) -> StateDictType:
    return FullyShardedDataParallel.get_state_dict_type(wrapper).state_dict_type


class _NamesTheWrapperInStates(FullyShardedDataParallel):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        prefix = kwargs.get("prefix", "")
        found: dict[str, Any] = super().state_dict(*args, **kwargs)
        return {f"{prefix}_fsdp_wrapped_module.{k.removeprefix(prefix)}": v for k, v in found.items()}


@mutant(after="pytorch/pytorch#74810", kills_on=_CALLED, trace=Trace.STATE)
class NamesTheWrapperInStates(FullyShardedDataParallelEngine):
    """Names in state dicts tell of the wrapper.

    Reported: names in a full state dict were not always those of the model alone.
    """

    names: ClassVar[WrapperNames] = names_with(_NamesTheWrapperInStates)


class _MixesUpBuffers(FullyShardedDataParallel):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        found: dict[str, Any] = super().state_dict(*args, **kwargs)
        *_, last = self.buffers()
        return {k: last.clone() if k in {"offset", "middle.calls"} else v for k, v in found.items()}


@mutant(after="pytorch/pytorch#93391", kills_on=_CALLED, trace=Trace.STATE)
class MixesUpBuffers(FullyShardedDataParallelEngine):
    """In state dicts all buffers are the last one.

    Reported: a loop over the buffers of a state dict used the variable of the loop before it.
    """

    names: ClassVar[WrapperNames] = names_with(_MixesUpBuffers)


class _ReusesWhatItSaved(FullyShardedDataParallel):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        found: dict[str, Any] = super().state_dict(*args, **kwargs)
        self.__dict__["saved_before"] = list(found.values())
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for tensor in self.__dict__.get("saved_before", []):
            if type(tensor) is torch.Tensor:
                tensor.detach().zero_()
        return super().forward(*args, **kwargs)


@mutant(after="facebookresearch/fairscale#440", kills_on=_CALLED, trace=Trace.STATE)
class ReusesWhatItSaved(FullyShardedDataParallelEngine):
    """The memory of a state dict is written over by the next forward.

    Reported: parameters of a state dict were freed where they had not been copied.
    """

    names: ClassVar[WrapperNames] = names_with(_ReusesWhatItSaved)


class _SavesOnEveryRank(FullyShardedDataParallel):
    @staticmethod
    @contextmanager
    def state_dict_type(module: nn.Module, kind: Any, *configs: Any) -> Iterator[None]:
        on_all = (
            replace(config, rank0_only=False) if getattr(config, "rank0_only", False) else config
            for config in configs
        )
        with FullyShardedDataParallel.state_dict_type(module, kind, *on_all):
            yield


@mutant(after="facebookresearch/fairscale#844", kills_on=_CALLED, trace=Trace.STATE)
class SavesOnEveryRank(FullyShardedDataParallelEngine):
    """Every rank is given full state dicts although rank 0 alone was to be.

    Reported: full state dicts on all ranks of a host were more than it could hold.
    """

    names: ClassVar[WrapperNames] = names_with(_SavesOnEveryRank)


class _SavesWholesAsShards(FullyShardedDataParallel):
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        if _kind(self) is not StateDictType.SHARDED_STATE_DICT:
            return super().state_dict(*args, **kwargs)
        with FullyShardedDataParallel.state_dict_type(self, StateDictType.FULL_STATE_DICT):
            return super().state_dict(*args, **kwargs)


@mutant(after="intelligent-machine-learning/dlrover#840", kills_on=_CALLED, trace=Trace.STATE)
class SavesWholesAsShards(FullyShardedDataParallelEngine):
    """A sharded state dict has every tensor whole, on every rank.

    Reported: every rank gathered what it was to save a shard of.
    """

    names: ClassVar[WrapperNames] = names_with(_SavesWholesAsShards)


class _LoadsParametersAlone(FullyShardedDataParallel):
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        before = [buffer.clone() for buffer in self.buffers()]
        result = super().load_state_dict(*args, **kwargs)
        for buffer, value in zip(self.buffers(), before, strict=True):
            buffer.copy_(value)
        return result


@mutant(after="sgl-project/sglang#19688", kills_on=_CALLED, trace=Trace.STATE)
class LoadsParametersAlone(FullyShardedDataParallelEngine):
    """Loading a state dict leaves buffers as they were.

    Reported: what was loaded was looked up among parameters, and buffers are none.
    """

    names: ClassVar[WrapperNames] = names_with(_LoadsParametersAlone)


class _Unloaded:
    """What loading says when all is well."""

    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()


class _IgnoresShardedStates(FullyShardedDataParallel):
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if _kind(self) is StateDictType.SHARDED_STATE_DICT:
            return _Unloaded()
        return super().load_state_dict(*args, **kwargs)


@mutant(after="pytorch/pytorch#109648", kills_on=_CALLED, trace=Trace.STATE)
class IgnoresShardedStates(FullyShardedDataParallelEngine):
    """Loading a sharded state dict changes nothing, and says nothing.

    Reported: what a model was set to load was not picked up.
    """

    names: ClassVar[WrapperNames] = names_with(_IgnoresShardedStates)


class _IgnoresLocalStates(FullyShardedDataParallel):
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if _kind(self) is StateDictType.LOCAL_STATE_DICT:
            return _Unloaded()
        return super().load_state_dict(*args, **kwargs)


@mutant(after="facebookresearch/fairscale#574", kills_on=_CALLED, trace=Trace.STATE)
class IgnoresLocalStates(FullyShardedDataParallelEngine):
    """Loading a local state dict changes nothing, and says nothing.

    Reported: saving and loading each rank's own state went through the wrong method.
    """

    names: ClassVar[WrapperNames] = names_with(_IgnoresLocalStates)
