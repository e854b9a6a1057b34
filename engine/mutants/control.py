"""Mutants that do not do what the caller tells single units: to gather, to free, to change their policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from engine.adapters.composable import ComposableUnit, FrontDoor, members
from engine.adapters.reference import PreparedReference, ReferenceEngine
from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.contract import UnitHandle

__all__ = [
    "GathersInForwardAlone",
    "GathersWhenWaitedFor",
    "HoldsBackTheFirstRootAlone",
    "IgnoresALaterPolicy",
    "LeavesOthersRowsStale",
    "ReshardsTheRootAlone",
    "TellsAllWhatOneWasTold",
    "WaitsForNoGather",
]


class _ReshardsTheRoot(PreparedReference):
    def units(self) -> Mapping[str, UnitHandle]:
        return {
            name: _DeafUnit(members(self.module, name), self.door) if name or not self.plan.units else unit
            for name, unit in super().units().items()
        }


class _DeafUnit(ComposableUnit):
    def reshard(self) -> None:
        """Change nothing."""


class ReshardsTheRootAlone(ReferenceEngine):
    """A call to free a unit has effect on the root, and only where it has units beside it.

    After meta-pytorch/torchtune#2483: a loop over all modules freed the outermost one again and again.
    """

    name = "mutant.ReshardsTheRootAlone"
    prepared_type = _ReshardsTheRoot


class _SetUnit(ComposableUnit):
    def set_reshard_after_forward(self, *, is_on: bool) -> None:
        """Change nothing."""


class _PreparedSet(PreparedFullyShard):
    unit_type = _SetUnit


class IgnoresALaterPolicy(FullyShardEngine):
    """What becomes of units after forward is settled when the model is wrapped; a later change has no effect.

    After pytorch/pytorch#149029: the policy could not be changed once the model had been wrapped.
    """

    name = "mutant.IgnoresALaterPolicy"
    prepared_type = _PreparedSet


class _RecursiveUnit(ComposableUnit):
    def set_reshard_after_forward(self, *, is_on: bool) -> None:
        self._first.set_reshard_after_forward(is_on)


class _PreparedRecursive(PreparedFullyShard):
    unit_type = _RecursiveUnit


class TellsAllWhatOneWasTold(FullyShardEngine):
    """A policy meant for the root alone reaches the units inside it too.

    After pytorch/pytorch#124318: a setter's argument that kept it from modules inside was not respected.
    """

    name = "mutant.TellsAllWhatOneWasTold"
    prepared_type = _PreparedRecursive


class _LazyUnit(ComposableUnit):
    def unshard(self) -> None:
        """Gather nothing."""

    def unshard_async(self) -> Callable[[], None]:
        return lambda: None


class _PreparedLazy(PreparedReference):
    unit_type = _LazyUnit


class GathersInForwardAlone(ReferenceEngine):
    """A call to gather a unit does nothing; forward and backward gather when they need to. The numbers are right.

    After deepspeedai/DeepSpeed#1069: gathers ahead of use were skipped, every one of them.
    """

    name = "mutant.GathersInForwardAlone"
    prepared_type = _PreparedLazy


class _EmptyHandedUnit(ComposableUnit):
    def unshard_async(self) -> Callable[[], None]:
        if not [*self._own_parameters()]:
            raise AttributeError("this unit has no gather that could be waited for")
        return super().unshard_async()


class _PreparedEmptyHanded(PreparedReference):
    unit_type = _EmptyHandedUnit


class WaitsForNoGather(ReferenceEngine):
    """A gather of a root whose parameters are all in its units gives nothing to wait for, and raises.

    After facebookresearch/fairscale#441: a model all of whose parameters were its children's broke the wrapper.
    """

    name = "mutant.WaitsForNoGather"
    prepared_type = _PreparedEmptyHanded


class _DeferringUnit(ComposableUnit):
    """Issues an asynchronous gather when somebody waits for it, on every other rank."""

    def unshard_async(self) -> Callable[[], None]:
        return self.unshard if dist.get_rank() % 2 else super().unshard_async()


class _PreparedDeferring(PreparedReference):
    unit_type = _DeferringUnit


class GathersWhenWaitedFor(ReferenceEngine):
    """An asynchronous gather is issued at once on some ranks, and on others when it is waited for.

    After meta-pytorch/torchrec#4149: some ranks issued a collective early, others after another, until all stood still.
    """

    name = "mutant.GathersWhenWaitedFor"
    prepared_type = _PreparedDeferring


class _PreparedStale(PreparedReference):
    """Remembers of each parameter what the asynchronous gather before brought."""

    def units(self) -> Mapping[str, UnitHandle]:
        units = super().units()
        if not hasattr(self, "_known"):
            self._known: dict[str, torch.Tensor] = {}
        return {name: _StaleUnit(members(self.module, name), self.door, self._known) for name in units}


class _StaleUnit(ComposableUnit):
    def __init__(
        self, modules: tuple[nn.Module, ...], door: FrontDoor, known: dict[str, torch.Tensor]
    ) -> None:
        super().__init__(modules, door)
        self._known = known

    def unshard_async(self) -> Callable[[], None]:
        wait = super().unshard_async()

        def wait_and_spoil() -> None:
            wait()
            self._spoil()

        return wait_and_spoil

    @torch.no_grad()
    def _spoil(self) -> None:
        """Put the rows of all ranks but this one back to what they were."""
        for name, parameter in self._first.named_parameters():
            if isinstance(parameter, DTensor):
                continue
            fresh = parameter.detach().clone()
            # .data, whose writes autograd does not see: memory that is used again tells nobody either.
            for rank, rows in enumerate(parameter.data.chunk(dist.get_world_size())):
                if rank != dist.get_rank() and name in self._known:
                    rows.copy_(self._known[name].chunk(dist.get_world_size())[rank])
            self._known[name] = fresh


class LeavesOthersRowsStale(ReferenceEngine):
    """From the second asynchronous gather on, a rank's own rows are new, and the others' those of the gather before.

    After karpathy/nanochat#843: memory of a gather under way was used again, so that of each matrix a rank had
    its own rows right and those of all others from before. Needs units that hold no other unit.
    """

    name = "mutant.LeavesOthersRowsStale"
    prepared_type = _PreparedStale


class _PreparedOneSided(PreparedReference):
    def _set_gradient_sync(self, *, is_on: bool) -> None:
        next(self._roots()).set_requires_gradient_sync(is_on)


class HoldsBackTheFirstRootAlone(ReferenceEngine):
    """Of several roots only the first accumulates; the others reduce every microbatch. The numbers are right.

    After speechbrain/speechbrain#2010: the loop that holds reductions back left off at the first module.
    """

    name = "mutant.HoldsBackTheFirstRootAlone"
    prepared_type = _PreparedOneSided
