"""Mutants that sin in no_sync of FullyShardedDataParallel, and in what it accumulates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import HandleShardingStrategy

from engine.adapters.torch_fsdp1 import FullyShardedDataParallelEngine
from engine.contract import WrapperNames
from engine.mutants.mutant import Condition, Trace, mutant
from engine.mutants.plans import CALLS_METHODS
from engine.mutants.wrapper_methods import names_with

_CALLED = Condition(plan=CALLS_METHODS, because="training alone accumulates nothing")


# Any, in all that follows: what torch's own methods take and give.


def _handles(root: FullyShardedDataParallel) -> list[Any]:
    units = FullyShardedDataParallel.fsdp_modules(root)
    return [unit._handle for unit in units if unit._handle is not None]


def _clear(root: FullyShardedDataParallel) -> None:
    """Forget gradients, wherever they are."""
    for parameter in root.parameters():
        parameter.grad = None
    for handle in _handles(root):
        handle.flat_param.grad = None
        for name in ("_saved_grad_shard", "_cpu_grad"):
            handle.flat_param.__dict__.pop(name, None)


class _ReplacesGradients(FullyShardedDataParallel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        _clear(self)
        return super().forward(*args, **kwargs)


@mutant(after="NVIDIA/Megatron-LM#7186", kills_on=_CALLED, trace=Trace.NUMBERS)
class ReplacesGradients(FullyShardedDataParallelEngine):
    """Each step of an accumulation discards the gradients of those before it.

    Reported: each backward was taken for the last, and began anew.
    """

    names: ClassVar[WrapperNames] = names_with(_ReplacesGradients)


class _LosesSharesInNoSync(FullyShardedDataParallel):
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        _clear(self)
        with super().no_sync():
            yield


@mutant(after="pytorch/pytorch#90546", kills_on=_CALLED, trace=Trace.NUMBERS)
class LosesSharesInNoSync(FullyShardedDataParallelEngine):
    """Entering no_sync discards the reduced gradients that a rank has.

    Reported: gradients of whole size were put where reduced ones had been.
    """

    names: ClassVar[WrapperNames] = names_with(_LosesSharesInNoSync)


class _SynchronisesInNoSync(FullyShardedDataParallel):
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield


@mutant(after="huggingface/transformers#34645", kills_on=_CALLED, trace=Trace.COMMUNICATION)
class SynchronisesInNoSync(FullyShardedDataParallelEngine):
    """No_sync of the wrapper does nothing; sums are right.

    Reported: the context was lost from the loop, and nobody noticed.
    """

    names: ClassVar[WrapperNames] = names_with(_SynchronisesInNoSync)


class _KeepsTheRootInNoSync(FullyShardedDataParallel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        strategies = HandleShardingStrategy
        handle: Any = self._handle
        if handle is not None and handle._sharding_strategy is not strategies.NO_SHARD:
            keeps = not self._sync_gradients
            handle._sharding_strategy = strategies.SHARD_GRAD_OP if keeps else strategies.FULL_SHARD
        return super().forward(*args, **kwargs)


@mutant(after="pytorch/pytorch#75892", kills_on=_CALLED, trace=Trace.COMMUNICATION)
class KeepsTheRootInNoSync(FullyShardedDataParallelEngine):
    """Inside no_sync the root keeps what it gathered, so that the next step gathers less.

    Reported: the number of gathers depended on whether the step before was in no_sync.
    """

    names: ClassVar[WrapperNames] = names_with(_KeepsTheRootInNoSync)


class _FreesInNoSync(FullyShardedDataParallel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for handle in _handles(self):
            strategy = handle._sharding_strategy
            if not self._sync_gradients and strategy is HandleShardingStrategy.SHARD_GRAD_OP:
                handle._sharding_strategy = HandleShardingStrategy.FULL_SHARD
        return super().forward(*args, **kwargs)


@mutant(after="NVIDIA/cosmos-framework#161", kills_on=_CALLED, trace=Trace.COMMUNICATION)
class FreesInNoSync(FullyShardedDataParallelEngine):
    """Parameters that were to be kept from step to step inside no_sync are freed, and gathered again.

    Reported: each step of an accumulation paid for communication that one could have done.
    """

    names: ClassVar[WrapperNames] = names_with(_FreesInNoSync)


def _silence(root: FullyShardedDataParallel, *, is_silent: bool) -> None:
    units: list[Any] = [*FullyShardedDataParallel.fsdp_modules(root)]
    for unit in units:
        unit._sync_gradients = not is_silent


class _EndsAllNoSyncsAtOnce(FullyShardedDataParallel):
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        _silence(self, is_silent=True)
        try:
            yield
        finally:
            _silence(self, is_silent=False)


@mutant(after="speechbrain/speechbrain#2010", kills_on=_CALLED, trace=Trace.COMMUNICATION)
class EndsAllNoSyncsAtOnce(FullyShardedDataParallelEngine):
    """The end of a no_sync inside another ends both.

    Reported: the contexts of several models ended when the first of them did.
    """

    names: ClassVar[WrapperNames] = names_with(_EndsAllNoSyncsAtOnce)


class _StaysSilentAfterAnException(FullyShardedDataParallel):
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        _silence(self, is_silent=True)
        yield
        _silence(self, is_silent=False)


@mutant(after="pytorch/torchtitan#3724", kills_on=_CALLED, trace=Trace.COMMUNICATION)
class StaysSilentAfterAnException(FullyShardedDataParallelEngine):
    """An exception inside no_sync leaves gradients unsynchronised for good.

    Reported: flags that were changed for a while were not given back where something raised.
    """

    names: ClassVar[WrapperNames] = names_with(_StaysSilentAfterAnException)


class _SilencesUnitsAlone(FullyShardedDataParallel):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for unit in FullyShardedDataParallel.fsdp_modules(self):
            unit.__class__ = _SilencesUnitsAlone  # torch makes units of its own class

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        _silence(self, is_silent=True)
        try:
            yield
        finally:
            _silence(self, is_silent=False)


@mutant(after="speechbrain/speechbrain#2010", kills_on=_CALLED, trace=Trace.SILENCE)
class SilencesUnitsAlone(FullyShardedDataParallelEngine):
    """A unit inside the root can be told not to synchronise, and the rest goes on.

    Reported: some of the modules accumulated, others synchronised.
    """

    names: ClassVar[WrapperNames] = names_with(_SilencesUnitsAlone)
