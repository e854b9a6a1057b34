"""Mutants of FSDP1's `summon_full_params`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from shardproof.engine.adapters.torch_fsdp1 import NAMES, FullyShardedDataParallelEngine
from shardproof.engine.contract import WrapperNames
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import unchanged

# Any, throughout: arguments and results of torch's own methods.

_summon: Any = FullyShardedDataParallel.summon_full_params


def _summoning(change: Callable[[dict[str, Any]], dict[str, Any]]) -> WrapperNames:
    """Return names whose wrapper summons with these options instead of the caller's."""

    class Summoner(FullyShardedDataParallel):
        @staticmethod
        def summon_full_params(module: nn.Module, **options: Any) -> Any:  # type: ignore[override]
            return _summon(module, **options | change(options))

    return replace(NAMES, FullyShardedDataParallel=Summoner)


# A function of the module and the options, which runs before and after what a caller does inside.
_Inside = Callable[[nn.Module, dict[str, Any]], AbstractContextManager[None]]


def _within(inside: _Inside) -> WrapperNames:
    """Return names whose wrapper summons, and enters this inside."""

    class Summoner(FullyShardedDataParallel):
        @staticmethod
        @contextmanager
        def summon_full_params(module: nn.Module, **options: Any) -> Iterator[None]:  # type: ignore[override]
            with _summon(module, **options), inside(module, options):
                yield

    return replace(NAMES, FullyShardedDataParallel=Summoner)


@mutant(after="pytorch/pytorch#107081", trace=Trace.STATE)
class NeverWritesBack(FullyShardedDataParallelEngine):
    """Changes made inside summon_full_params are lost."""

    names = _summoning(lambda _: {"writeback": False})


@mutant(after="pytorch/pytorch#73903", trace=Trace.STATE)
class AlwaysWritesBack(FullyShardedDataParallelEngine):
    """Changes made inside summon_full_params persist although writeback is off."""

    names = _summoning(lambda options: {"writeback": not options.get("rank0_only", False)})


@mutant(after="pytorch/pytorch#107081", trace=Trace.STATE)
class UndoesWhatIsNotWrittenBack(FullyShardedDataParallelEngine):
    """Without writeback, changes made inside summon_full_params are undone also where nothing is sharded."""

    names = _within(
        lambda module, options: unchanged([] if options.get("writeback", True) else [*module.parameters()])
    )


@contextmanager
def _broadcast_at_the_end(module: nn.Module, options: dict[str, Any]) -> Iterator[None]:
    yield
    if options.get("writeback", True):
        for parameter in module.parameters():
            distributed.broadcast(parameter.detach(), 0)


@mutant(after="pytorch/pytorch#93938", trace=Trace.STATE)
class WritesBackFromRank0(FullyShardedDataParallelEngine):
    """The values that rank 0 wrote are written back to the shares of all ranks."""

    names = _within(_broadcast_at_the_end)


@mutant(after="pytorch/pytorch#92235", trace=Trace.STATE)
class AlwaysSummonsAll(FullyShardedDataParallelEngine):
    """Units inside are summoned too although recurse is off."""

    names = _summoning(lambda _: {"recurse": True})


@mutant(after="pytorch/pytorch#73903", trace=Trace.STATE)
class SummonsOnAllRanks(FullyShardedDataParallelEngine):
    """Every rank has whole parameters although only rank 0 should."""

    names = _summoning(lambda _: {"rank0_only": False})


@mutant(after="pytorch/pytorch#98817", trace=Trace.STATE)
class SummonsNoGradients(FullyShardedDataParallelEngine):
    """Gradients are not summoned although with_grads is on."""

    names = _summoning(lambda _: {"with_grads": False})


@mutant(after="pytorch/pytorch#93938", trace=Trace.SILENCE)
class TakesEveryCombination(FullyShardedDataParallelEngine):
    """Of options that exclude each other some are ignored silently."""

    names = _summoning(
        lambda options: {
            "writeback": options.get("writeback", True) and not options.get("rank0_only", False),
            "with_grads": False,
            "offload_to_cpu": False,
        }
    )


@mutant(after="pytorch/pytorch#104504", trace=Trace.SILENCE)
class SummonsAnywhere(FullyShardedDataParallelEngine):
    """If parameters cannot be summoned, the call silently does nothing."""

    class Wrapper(FullyShardedDataParallel):
        @staticmethod
        @contextmanager
        def summon_full_params(module: nn.Module, **options: Any) -> Iterator[None]:  # type: ignore[override]
            context = _summon(module, **options)
            try:
                context.__enter__()
            except AssertionError:
                yield
                return
            try:
                yield
            finally:
                context.__exit__(None, None, None)


@torch.no_grad()
def _add(module: nn.Module, number: float) -> None:
    for parameter in module.parameters():
        parameter.add_(number)


@mutant(after="pytorch/pytorch#188989", trace=Trace.STATE)
class SpoilsWhatGoesToTheHost(FullyShardedDataParallelEngine):
    """Values that are summoned or saved to the host change on the way."""

    class Wrapper(FullyShardedDataParallel):
        @staticmethod
        @contextmanager
        def summon_full_params(module: nn.Module, **options: Any) -> Iterator[None]:  # type: ignore[override]
            is_hosted = options.pop("offload_to_cpu", False)
            with _summon(module, **options):
                is_spoilt = is_hosted and (not options.get("rank0_only") or distributed.get_rank() == 0)
                _add(module, is_spoilt * 1.0)
                yield
                _add(module, is_spoilt * -1.0)

        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
            settings = FullyShardedDataParallel.get_state_dict_type(self)
            full = StateDictType.FULL_STATE_DICT
            if settings.state_dict_type is not full or not settings.state_dict_config.offload_to_cpu:
                return super().state_dict(*args, **kwargs)
            with FullyShardedDataParallel.state_dict_type(self, full):
                found = super().state_dict(*args, **kwargs)
            return {name: value + 1 for name, value in found.items()}


@torch.no_grad()
def _roll(module: nn.Module, by: int) -> None:
    for parameter in module.parameters():
        parameter.copy_(parameter.roll(by))


@contextmanager
def _rolled(module: nn.Module, _: dict[str, Any]) -> Iterator[None]:
    _roll(module, 1)
    yield
    _roll(module, -1)


@mutant(after="pytorch/pytorch#97667", trace=Trace.STATE)
class MisalignsWhatItSummons(FullyShardedDataParallelEngine):
    """Every summoned parameter is one element off."""

    names = _within(_rolled)


@contextmanager
def _thawed(module: nn.Module, _: dict[str, Any]) -> Iterator[None]:
    frozen = [p for p in module.parameters() if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    yield
    for parameter in frozen:
        parameter.requires_grad_(False)


@mutant(after="pytorch/pytorch#109892", trace=Trace.STATE)
class ShowsFrozenOnesAsTrained(FullyShardedDataParallelEngine):
    """Frozen parameters require gradients inside summon_full_params."""

    names = _within(_thawed)


@mutant(after="pytorch/pytorch#106858", trace=Trace.STATE)
class ForgetsWritesAfterAnEvaluation(FullyShardedDataParallelEngine):
    """What is written to whole parameters is lost once a forward without gradients cast them."""

    class Wrapper(FullyShardedDataParallel):
        has_cast = False

        def forward(self, *args: Any, **named: Any) -> Any:
            self.has_cast = not torch.is_grad_enabled() and self.mixed_precision.param_dtype is not None
            return super().forward(*args, **named)

        @staticmethod
        def summon_full_params(module: nn.Module, **options: Any) -> Any:  # type: ignore[override]
            has_cast = isinstance(module, ForgetsWritesAfterAnEvaluation.Wrapper) and module.has_cast
            return _summon(module, **options | ({"writeback": False} if has_cast else {}))
