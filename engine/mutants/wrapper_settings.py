"""Mutants that sin in the state dict type of what FullyShardedDataParallel wraps: set, told, scoped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from engine.adapters.torch_fsdp1 import FullyShardedDataParallelEngine
from engine.contract import WrapperNames
from engine.mutants.mutant import Condition, Trace, mutant
from engine.mutants.plans import CALLS_METHODS
from engine.mutants.wrapper_methods import names_with

_CALLED = Condition(plan=CALLS_METHODS, because="training alone sets no type")


# Any, in all that follows: what torch's own methods take and give.


class _ForgetsConfigs(FullyShardedDataParallel):
    @staticmethod
    def set_state_dict_type(module: nn.Module, state_dict_type: StateDictType, *configs: Any) -> Any:
        return FullyShardedDataParallel.set_state_dict_type(module, state_dict_type)


@mutant(after="pytorch/pytorch#109648", kills_on=_CALLED, trace=Trace.STATE)
class ForgetsConfigs(FullyShardedDataParallelEngine):
    """State dicts are of the type that was set, and of its default configs.

    Reported: a flag of the configs was not picked up until somebody asked for them.
    """

    names: ClassVar[WrapperNames] = names_with(_ForgetsConfigs)


class _TellsTheNewTypeAsTheOld(FullyShardedDataParallel):
    @staticmethod
    def set_state_dict_type(module: nn.Module, *args: Any) -> Any:
        FullyShardedDataParallel.set_state_dict_type(module, *args)
        return FullyShardedDataParallel.get_state_dict_type(module)


@mutant(after="pytorch/pytorch#86243", kills_on=_CALLED, trace=Trace.STATE)
class TellsTheNewTypeAsTheOld(FullyShardedDataParallelEngine):
    """What was set before is told to be what is set now.

    Reported: what a context gave back had to be handed to the caller, who sets without one.
    """

    names: ClassVar[WrapperNames] = names_with(_TellsTheNewTypeAsTheOld)


class _SetsTheTypeOfTheFirstRootAlone(FullyShardedDataParallel):
    @staticmethod
    def set_state_dict_type(module: nn.Module, *args: Any) -> Any:
        first, *_ = FullyShardedDataParallel.fsdp_modules(module)
        return FullyShardedDataParallel.set_state_dict_type(first, *args)


@mutant(after="pytorch/pytorch#73716", kills_on=_CALLED, trace=Trace.STATE)
class SetsTheTypeOfTheFirstRootAlone(FullyShardedDataParallelEngine):
    """Of several wrapped models in a module, only the first is set to a type.

    Reported: the type was set on the module that was asked, and on no other.
    """

    names: ClassVar[WrapperNames] = names_with(_SetsTheTypeOfTheFirstRootAlone)


class _ScopesNothing(FullyShardedDataParallel):
    @staticmethod
    @contextmanager
    def state_dict_type(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield


@mutant(after="pytorch/pytorch#109648", kills_on=_CALLED, trace=Trace.STATE)
class ScopesNothing(FullyShardedDataParallelEngine):
    """The context state_dict_type changes nothing.

    Reported: what was set was not picked up.
    """

    names: ClassVar[WrapperNames] = names_with(_ScopesNothing)


class _LeavesFullStateDicts(FullyShardedDataParallel):
    @staticmethod
    @contextmanager
    def state_dict_type(module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[None]:
        FullyShardedDataParallel.set_state_dict_type(module, *args, **kwargs)
        yield
        FullyShardedDataParallel.set_state_dict_type(module, StateDictType.FULL_STATE_DICT)


@mutant(after="pytorch/torchtitan#3724", kills_on=_CALLED, trace=Trace.STATE)
class LeavesFullStateDicts(FullyShardedDataParallelEngine):
    """At the end of a context the type is the default, not what it was before.

    Reported: flags were set to their default where the exact state before was meant.
    """

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


@mutant(after="pytorch/torchtitan#3724", kills_on=_CALLED, trace=Trace.STATE)
class LeavesTheTypeAfterAnException(FullyShardedDataParallelEngine):
    """An exception inside a context leaves the type that the context had set.

    Reported: what was changed for a while was not given back where something raised.
    """

    names: ClassVar[WrapperNames] = names_with(_LeavesTheTypeAfterAnException)


class _TakesConfigsOfOtherTypes(FullyShardedDataParallel):
    @staticmethod
    def set_state_dict_type(module: nn.Module, *args: Any) -> Any:
        with suppress(RuntimeError):
            return FullyShardedDataParallel.set_state_dict_type(module, *args)
        return FullyShardedDataParallel.set_state_dict_type(module, args[0])


@mutant(after="pytorch/pytorch#109648", kills_on=_CALLED, trace=Trace.SILENCE)
class TakesConfigsOfOtherTypes(FullyShardedDataParallelEngine):
    """A config that belongs to another type is ignored in silence.

    Reported: what a config said was ignored in silence.
    """

    names: ClassVar[WrapperNames] = names_with(_TakesConfigsOfOtherTypes)


class _TellsTheTypeOfSomeUnit(FullyShardedDataParallel):
    @staticmethod
    def get_state_dict_type(module: nn.Module) -> Any:
        try:
            return FullyShardedDataParallel.get_state_dict_type(module)
        except AssertionError:
            *_, last = FullyShardedDataParallel.fsdp_modules(module)
            return FullyShardedDataParallel.get_state_dict_type(last)


@mutant(after="pytorch/pytorch#102658", kills_on=_CALLED, trace=Trace.STATE)
class TellsTheTypeOfSomeUnit(FullyShardedDataParallelEngine):
    """Where units are set to several types, that of one of them is told.

    Reported: what is told where units differ had to be written down.
    """

    names: ClassVar[WrapperNames] = names_with(_TellsTheTypeOfSomeUnit)
