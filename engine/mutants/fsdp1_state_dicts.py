"""Mutants of FSDP1's state dicts, their types and configs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType, StateDictType

from shardproof.engine.adapters.torch_fsdp1 import NAMES, FullyShardedDataParallelEngine, PreparedFsdp1
from shardproof.engine.contract import WrapperNames
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import unchanged

# Any, throughout: arguments and results of torch's own methods.


def _kind(wrapper: FullyShardedDataParallel) -> StateDictType:
    return FullyShardedDataParallel.get_state_dict_type(wrapper).state_dict_type


@mutant(after="pytorch/pytorch#74810", trace=Trace.STATE)
class NamesTheWrapperInStates(FullyShardedDataParallelEngine):
    """Names in state dicts contain the wrapper's prefix."""

    class Wrapper(FullyShardedDataParallel):
        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
            prefix = kwargs.get("prefix", "")
            found: dict[str, Any] = super().state_dict(*args, **kwargs)
            return {f"{prefix}_fsdp_wrapped_module.{k.removeprefix(prefix)}": v for k, v in found.items()}


@mutant(after="pytorch/pytorch#93391", trace=Trace.STATE)
class MixesUpBuffers(FullyShardedDataParallelEngine):
    """In state dicts all buffers are the last one."""

    class Wrapper(FullyShardedDataParallel):
        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
            found: dict[str, Any] = super().state_dict(*args, **kwargs)
            *_, last = self.buffers()
            return {k: last.clone() if k in {"offset", "middle.calls"} else v for k, v in found.items()}


@mutant(after="facebookresearch/fairscale#440", trace=Trace.STATE)
class ReusesWhatItSaved(FullyShardedDataParallelEngine):
    """The next forward overwrites the memory of a state dict."""

    class Wrapper(FullyShardedDataParallel):
        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
            found: dict[str, Any] = super().state_dict(*args, **kwargs)
            self.__dict__["saved_before"] = list(found.values())
            return found

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            for tensor in self.__dict__.get("saved_before", []):
                if type(tensor) is torch.Tensor:
                    tensor.detach().zero_()
            return super().forward(*args, **kwargs)


@mutant(after="facebookresearch/fairscale#844", trace=Trace.STATE)
class SavesOnEveryRank(FullyShardedDataParallelEngine):
    """Every rank has full state dicts although rank0_only is on."""

    class Wrapper(FullyShardedDataParallel):
        @staticmethod
        @contextmanager
        def state_dict_type(module: nn.Module, kind: Any, *configs: Any) -> Iterator[None]:
            on_all = (
                replace(config, rank0_only=False) if getattr(config, "rank0_only", False) else config
                for config in configs
            )
            with FullyShardedDataParallel.state_dict_type(module, kind, *on_all):
                yield


@mutant(after="intelligent-machine-learning/dlrover#840", trace=Trace.STATE)
class SavesWholesAsShards(FullyShardedDataParallelEngine):
    """A sharded state dict has every tensor whole, on every rank."""

    class Wrapper(FullyShardedDataParallel):
        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
            if _kind(self) is not StateDictType.SHARDED_STATE_DICT:
                return super().state_dict(*args, **kwargs)
            with FullyShardedDataParallel.state_dict_type(self, StateDictType.FULL_STATE_DICT):
                return super().state_dict(*args, **kwargs)


@mutant(after="sgl-project/sglang#19688", trace=Trace.STATE)
class LoadsParametersAlone(FullyShardedDataParallelEngine):
    """Loading a state dict leaves buffers unchanged."""

    class Wrapper(FullyShardedDataParallel):
        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            with unchanged(self.buffers()):
                return super().load_state_dict(*args, **kwargs)


class _Unloaded:
    """The result of loading when all keys match."""

    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()


def _loading_none(kind: StateDictType) -> WrapperNames:
    """Return names whose wrapper silently loads no state dict of this type."""

    class Unloading(FullyShardedDataParallel):
        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return _Unloaded() if _kind(self) is kind else super().load_state_dict(*args, **kwargs)

    return replace(NAMES, FullyShardedDataParallel=Unloading)


@mutant(after="pytorch/pytorch#109648", trace=Trace.STATE)
class IgnoresShardedStates(FullyShardedDataParallelEngine):
    """Loading a sharded state dict silently changes nothing."""

    names = _loading_none(StateDictType.SHARDED_STATE_DICT)


@mutant(after="facebookresearch/fairscale#574", trace=Trace.STATE)
class IgnoresLocalStates(FullyShardedDataParallelEngine):
    """Loading a local state dict silently changes nothing."""

    names = _loading_none(StateDictType.LOCAL_STATE_DICT)


def _with_types(types: Mapping[StateDictType, StateDictType]) -> WrapperNames:
    """Return names that confuse one type of state dict with another, and ignore configs."""

    class Set(FullyShardedDataParallel):
        # Any: configs, and settings.
        @staticmethod
        def set_state_dict_type(module: nn.Module, state_dict_type: StateDictType, *configs: Any) -> Any:
            taken = types.get(state_dict_type, state_dict_type)
            return FullyShardedDataParallel.set_state_dict_type(module, taken)

        @staticmethod
        @contextmanager
        def state_dict_type(
            module: nn.Module, state_dict_type: StateDictType, *configs: Any
        ) -> Iterator[None]:
            taken = types.get(state_dict_type, state_dict_type)
            with FullyShardedDataParallel.state_dict_type(module, taken):
                yield

    return replace(NAMES, FullyShardedDataParallel=Set)


@mutant(after="Lightning-AI/lightning-thunder#908", trace=Trace.STATE)
class IgnoresStateConfigs(FullyShardedDataParallelEngine):
    """Configs of state dicts have no effect."""

    names = _with_types({})


@mutant(after="facebookresearch/fairscale#601", trace=Trace.STATE)
class GivesShardsForWholes(FullyShardedDataParallelEngine):
    """A full state dict is a sharded one."""

    names = _with_types({StateDictType.FULL_STATE_DICT: StateDictType.SHARDED_STATE_DICT})


@mutant(after="pytorch/pytorch#136228", trace=Trace.STATE)
class GivesWholesForShards(FullyShardedDataParallelEngine):
    """A sharded state dict is a full one."""

    names = _with_types({StateDictType.SHARDED_STATE_DICT: StateDictType.FULL_STATE_DICT})


@mutant(after="pytorch/pytorch#54736", trace=Trace.STATE)
class NumbersStateByName(FullyShardedDataParallelEngine):
    """Optimizer state is numbered in alphabetical order of names."""

    class Wrapper(FullyShardedDataParallel):
        # Any: states of optimizers.
        @staticmethod
        def rekey_optim_state_dict(
            optim_state_dict: dict[str, Any],
            optim_state_key_type: OptimStateKeyType,
            model: nn.Module,
            *_: Any,
            **__: Any,
        ) -> dict[str, Any]:
            names = [name for name, _ in model.named_parameters()]
            numbers = {name: number for number, name in enumerate(sorted(names))}
            if optim_state_key_type is OptimStateKeyType.PARAM_NAME:
                keys: Mapping[Any, Any] = {number: name for name, number in numbers.items()}
            else:
                keys = numbers
            state, groups = optim_state_dict["state"], optim_state_dict["param_groups"]
            return {
                "state": {keys[key]: value for key, value in state.items()},
                "param_groups": [
                    {**group, "params": [keys[key] for key in group["params"]]} for group in groups
                ],
            }


@mutant(after="pytorch/pytorch#109648", trace=Trace.STATE)
class ForgetsConfigs(FullyShardedDataParallelEngine):
    """State dicts have the type that was set, but its default configs."""

    class Wrapper(FullyShardedDataParallel):
        @staticmethod
        def set_state_dict_type(module: nn.Module, state_dict_type: StateDictType, *configs: Any) -> Any:
            return FullyShardedDataParallel.set_state_dict_type(module, state_dict_type)


@mutant(after="pytorch/pytorch#86243", trace=Trace.STATE)
class TellsTheNewTypeAsTheOld(FullyShardedDataParallelEngine):
    """set_state_dict_type returns the new type, not the previous one."""

    class Wrapper(FullyShardedDataParallel):
        @staticmethod
        def set_state_dict_type(module: nn.Module, *args: Any) -> Any:
            FullyShardedDataParallel.set_state_dict_type(module, *args)
            return FullyShardedDataParallel.get_state_dict_type(module)


@mutant(after="pytorch/pytorch#73716", trace=Trace.STATE)
class SetsTheTypeOfTheFirstRootAlone(FullyShardedDataParallelEngine):
    """Of several wrapped models in a module, the type is set only for the first."""

    class Wrapper(FullyShardedDataParallel):
        @staticmethod
        def set_state_dict_type(module: nn.Module, *args: Any) -> Any:
            first, *_ = FullyShardedDataParallel.fsdp_modules(module)
            return FullyShardedDataParallel.set_state_dict_type(first, *args)


@mutant(after="pytorch/pytorch#109648", trace=Trace.STATE)
class ScopesNothing(FullyShardedDataParallelEngine):
    """The context state_dict_type changes nothing."""

    class Wrapper(FullyShardedDataParallel):
        @staticmethod
        @contextmanager
        def state_dict_type(*args: Any, **kwargs: Any) -> Iterator[None]:
            yield


@mutant(after="pytorch/torchtitan#3724", trace=Trace.STATE)
class LeavesTheTypeAfterAnException(FullyShardedDataParallelEngine):
    """An exception inside a context leaves the context's type set."""

    class Wrapper(FullyShardedDataParallel):
        @staticmethod
        @contextmanager
        def state_dict_type(module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[None]:
            before = FullyShardedDataParallel.set_state_dict_type(module, *args, **kwargs)
            yield
            FullyShardedDataParallel.set_state_dict_type(
                module, before.state_dict_type, before.state_dict_config, before.optim_state_dict_config
            )


@mutant(after="pytorch/pytorch#109648", trace=Trace.SILENCE)
class TakesConfigsOfOtherTypes(FullyShardedDataParallelEngine):
    """A config of another type is silently ignored."""

    class Wrapper(FullyShardedDataParallel):
        @staticmethod
        def set_state_dict_type(module: nn.Module, *args: Any) -> Any:
            with suppress(RuntimeError):
                return FullyShardedDataParallel.set_state_dict_type(module, *args)
            return FullyShardedDataParallel.set_state_dict_type(module, args[0])


@mutant(after="pytorch/pytorch#102658", trace=Trace.STATE)
class TellsTheTypeOfSomeUnit(FullyShardedDataParallelEngine):
    """If units have several types, get_state_dict_type returns that of one of them."""

    class Wrapper(FullyShardedDataParallel):
        @staticmethod
        def get_state_dict_type(module: nn.Module) -> Any:
            try:
                return FullyShardedDataParallel.get_state_dict_type(module)
            except AssertionError:
                *_, last = FullyShardedDataParallel.fsdp_modules(module)
                return FullyShardedDataParallel.get_state_dict_type(last)


@mutant(after="pytorch/pytorch#126310", trace=Trace.STATE)
class NamesModulesOnceInItsState(FullyShardedDataParallelEngine):
    """The whole state has parameters of a module under one of its names alone."""

    class Prepared(PreparedFsdp1):
        def full_state(self) -> dict[str, Any]:
            state = super().full_state()
            once = {n for n, _ in self.named.named_parameters()}
            twice = {n for n, _ in self.named.named_parameters(remove_duplicate=False)} - once
            state["model"] = {name: value for name, value in state["model"].items() if name not in twice}
            return state
