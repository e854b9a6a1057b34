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
from engine.mutants.mutant import Condition, Trace, mutant
from engine.mutants.plans import WRAPPED


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


@mutant(
    after="Lightning-AI/lightning-thunder#908",
    kills_on=Condition(plan=WRAPPED, because="their defaults are honoured"),
    trace=Trace.STATE,
)
class IgnoresStateConfigs(FullyShardedDataParallelEngine):
    """Configs of state dicts have no effect.

    Reported: what was handed out was not of the form that was asked for.
    """

    names: ClassVar[WrapperNames] = _with_types({})


@mutant(
    after="facebookresearch/fairscale#601",
    kills_on=Condition(plan=WRAPPED, because="other types are honoured"),
    trace=Trace.STATE,
)
class GivesShardsForWholes(FullyShardedDataParallelEngine):
    """A full state dict is a sharded one.

    Reported: the local state of an optimizer was taken for the whole.
    """

    names: ClassVar[WrapperNames] = _with_types(
        {StateDictType.FULL_STATE_DICT: StateDictType.SHARDED_STATE_DICT}
    )


@mutant(
    after="pytorch/pytorch#136228",
    kills_on=Condition(plan=WRAPPED, because="other types are honoured"),
    trace=Trace.STATE,
)
class GivesWholesForShards(FullyShardedDataParallelEngine):
    """A sharded state dict is a full one.

    Reported: state was taken to have another shape than it has.
    """

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


@mutant(
    after="pytorch/pytorch#54736",
    kills_on=Condition(plan=WRAPPED, because="names are right"),
    trace=Trace.STATE,
)
class NumbersStateByName(FullyShardedDataParallelEngine):
    """Ids of optimizer state follow the alphabet.

    Reported: ids of interleaved parameters were mapped to each other's state.
    """

    names: ClassVar[WrapperNames] = replace(NAMES, FullyShardedDataParallel=_Alphabetical)
