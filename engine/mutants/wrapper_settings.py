"""Mutants that sin in the state dict type of what FullyShardedDataParallel wraps: set, told, scoped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from engine.adapters.torch_fsdp1 import FullyShardedDataParallelEngine
from engine.contract import WrapperNames
from engine.mutants.wrapper_methods import names_with

__all__ = [
    "ForgetsConfigs",
    "LeavesFullStateDicts",
    "LeavesTheTypeAfterAnException",
    "ScopesNothing",
    "SetsTheTypeOfTheFirstRootAlone",
    "TakesConfigsOfOtherTypes",
    "TellsTheNewTypeAsTheOld",
    "TellsTheTypeOfSomeUnit",
]

# Any, in all that follows: what torch's own methods take and give.


class _ForgetsConfigs(FullyShardedDataParallel):
    @staticmethod
    def set_state_dict_type(module: nn.Module, state_dict_type: StateDictType, *configs: Any) -> Any:
        return FullyShardedDataParallel.set_state_dict_type(module, state_dict_type)


class ForgetsConfigs(FullyShardedDataParallelEngine):
    """State dicts are of the type that was set, and of its default configs.

    After pytorch/pytorch#109648: a flag of the configs was not picked up until somebody asked for them.
    """

    name = "mutant.ForgetsConfigs"
    names: ClassVar[WrapperNames] = names_with(_ForgetsConfigs)


class _TellsTheNewTypeAsTheOld(FullyShardedDataParallel):
    @staticmethod
    def set_state_dict_type(module: nn.Module, *args: Any) -> Any:
        FullyShardedDataParallel.set_state_dict_type(module, *args)
        return FullyShardedDataParallel.get_state_dict_type(module)


class TellsTheNewTypeAsTheOld(FullyShardedDataParallelEngine):
    """What was set before is told to be what is set now.

    After pytorch/pytorch#86243: what a context gave back had to be handed to the caller, who sets without one.
    """

    name = "mutant.TellsTheNewTypeAsTheOld"
    names: ClassVar[WrapperNames] = names_with(_TellsTheNewTypeAsTheOld)


class _SetsTheTypeOfTheFirstRootAlone(FullyShardedDataParallel):
    @staticmethod
    def set_state_dict_type(module: nn.Module, *args: Any) -> Any:
        first, *_ = FullyShardedDataParallel.fsdp_modules(module)
        return FullyShardedDataParallel.set_state_dict_type(first, *args)


class SetsTheTypeOfTheFirstRootAlone(FullyShardedDataParallelEngine):
    """Of several wrapped models in a module, only the first is set to a type.

    After pytorch/pytorch#73716: the type was set on the module that was asked, and on no other.
    """

    name = "mutant.SetsTheTypeOfTheFirstRootAlone"
    names: ClassVar[WrapperNames] = names_with(_SetsTheTypeOfTheFirstRootAlone)


class _ScopesNothing(FullyShardedDataParallel):
    @staticmethod
    @contextmanager
    def state_dict_type(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield


class ScopesNothing(FullyShardedDataParallelEngine):
    """The context ``state_dict_type`` changes nothing.

    After pytorch/pytorch#109648: what was set was not picked up.
    """

    name = "mutant.ScopesNothing"
    names: ClassVar[WrapperNames] = names_with(_ScopesNothing)


class _LeavesFullStateDicts(FullyShardedDataParallel):
    @staticmethod
    @contextmanager
    def state_dict_type(module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[None]:
        FullyShardedDataParallel.set_state_dict_type(module, *args, **kwargs)
        yield
        FullyShardedDataParallel.set_state_dict_type(module, StateDictType.FULL_STATE_DICT)


class LeavesFullStateDicts(FullyShardedDataParallelEngine):
    """At the end of a context the type is the default, not what it was before.

    After pytorch/torchtitan#3724: flags were set to their default where the exact state before was meant.
    """

    name = "mutant.LeavesFullStateDicts"
    names: ClassVar[WrapperNames] = names_with(_LeavesFullStateDicts)


class _LeavesTheTypeAfterAnException(FullyShardedDataParallel):
    @staticmethod
    @contextmanager
    def state_dict_type(module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[None]:
        before = FullyShardedDataParallel.set_state_dict_type(module, *args, **kwargs)
        yield
        FullyShardedDataParallel.set_state_dict_type(
            module, before.state_dict_type, before.state_dict_config, before.optim_state_dict_config
        )


class LeavesTheTypeAfterAnException(FullyShardedDataParallelEngine):
    """An exception inside a context leaves the type that the context had set.

    After pytorch/torchtitan#3724: what was changed for a while was not given back where something raised.
    """

    name = "mutant.LeavesTheTypeAfterAnException"
    names: ClassVar[WrapperNames] = names_with(_LeavesTheTypeAfterAnException)


class _TakesConfigsOfOtherTypes(FullyShardedDataParallel):
    @staticmethod
    def set_state_dict_type(module: nn.Module, *args: Any) -> Any:
        with suppress(RuntimeError):
            return FullyShardedDataParallel.set_state_dict_type(module, *args)
        return FullyShardedDataParallel.set_state_dict_type(module, args[0])


class TakesConfigsOfOtherTypes(FullyShardedDataParallelEngine):
    """A config that belongs to another type is ignored in silence.

    After pytorch/pytorch#109648: what a config said was ignored in silence.
    """

    name = "mutant.TakesConfigsOfOtherTypes"
    names: ClassVar[WrapperNames] = names_with(_TakesConfigsOfOtherTypes)


class _TellsTheTypeOfSomeUnit(FullyShardedDataParallel):
    @staticmethod
    def get_state_dict_type(module: nn.Module) -> Any:
        try:
            return FullyShardedDataParallel.get_state_dict_type(module)
        except AssertionError:
            *_, last = FullyShardedDataParallel.fsdp_modules(module)
            return FullyShardedDataParallel.get_state_dict_type(last)


class TellsTheTypeOfSomeUnit(FullyShardedDataParallelEngine):
    """Where units are set to several types, that of one of them is told.

    After pytorch/pytorch#102658: what is told where units differ had to be written down.
    """

    name = "mutant.TellsTheTypeOfSomeUnit"
    names: ClassVar[WrapperNames] = names_with(_TellsTheTypeOfSomeUnit)
