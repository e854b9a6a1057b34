"""Mutants that misread the settings of state dicts of FullyShardedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    OptimStateKeyType,
    StateDictType,
)

from engine.adapters.torch_fsdp1 import NAMES, FullyShardedDataParallelEngine
from engine.contract import WrapperNames

__all__ = [
    "GivesShardsForWholes",
    "GivesWholesForShards",
    "IgnoresStateConfigs",
    "NumbersStateByName",
]


def _with_types(types: Mapping[StateDictType, StateDictType]) -> WrapperNames:
    """Give names that take one type of state dict for another, and no config at all."""

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


class IgnoresStateConfigs(FullyShardedDataParallelEngine):
    """State dicts are of the type set, and their configs have no effect.

    After Lightning-AI/lightning-thunder#908: what was handed out was not of the form that was asked for.
    """

    name = "mutant.IgnoresStateConfigs"
    names: ClassVar[WrapperNames] = _with_types({})


class GivesShardsForWholes(FullyShardedDataParallelEngine):
    """Who asks for whole state is given shards.

    After facebookresearch/fairscale#601: the local state of an optimizer was taken for the whole.
    """

    name = "mutant.GivesShardsForWholes"
    names: ClassVar[WrapperNames] = _with_types(
        {StateDictType.FULL_STATE_DICT: StateDictType.SHARDED_STATE_DICT}
    )


class GivesWholesForShards(FullyShardedDataParallelEngine):
    """Who asks for shards is given whole state.

    After pytorch/pytorch#136228: state was taken to have another shape than it has.
    """

    name = "mutant.GivesWholesForShards"
    names: ClassVar[WrapperNames] = _with_types(
        {StateDictType.SHARDED_STATE_DICT: StateDictType.FULL_STATE_DICT}
    )


class _Alphabetical(FullyShardedDataParallel):
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
            "param_groups": [{**group, "params": [keys[key] for key in group["params"]]} for group in groups],
        }


class NumbersStateByName(FullyShardedDataParallelEngine):
    """The ids of optimizer state follow the alphabet, not the model; there and back nothing is lost.

    After pytorch/pytorch#54736: ids of interleaved parameters were mapped to each other's state.
    """

    name = "mutant.NumbersStateByName"
    names: ClassVar[WrapperNames] = replace(NAMES, FullyShardedDataParallel=_Alphabetical)
