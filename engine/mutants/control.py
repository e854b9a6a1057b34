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
from engine.capability import Capability
from engine.contract import UnitHandle
from engine.mutants.mutant import Condition, Trace, mutant
from engine.plan import Accumulation, Grouping, Layout, Plan, Reshard, Roots

_CONTROLLED = Plan(
    layout=Layout.SHARD,
    grouping=Grouping.REQUIRED,
    reshard=Reshard.KEEP,
    demands=frozenset({Capability.UNIT_STATE}),
)
_SEVERAL_ROOTS = Plan(layout=Layout.SHARD, roots=Roots.EACH_UNIT, accumulation=Accumulation.LAST_MICROBATCH)


class _ReshardsTheRoot(PreparedReference):
    def units(self) -> Mapping[str, UnitHandle]:
        return {
            name: _DeafUnit(members(self.module, name), self.door) if name or not self.plan.units else unit
            for name, unit in super().units().items()
        }


class _DeafUnit(ComposableUnit):
    def reshard(self) -> None:
        """Change nothing."""


@mutant(after="meta-pytorch/torchtune#2483", kills_on=Condition(plan=_CONTROLLED), trace=Trace.STATE)
class ReshardsTheRootAlone(ReferenceEngine):
    """A call to free a unit has no effect on units inside the root.

    Reported: a loop over all modules freed the outermost one again and again.
    """

    prepared_type = _ReshardsTheRoot


class _SetUnit(ComposableUnit):
    def set_reshard_after_forward(self, *, is_on: bool) -> None:
        """Change nothing."""


class _PreparedSet(PreparedFullyShard):
    unit_type = _SetUnit


@mutant(after="pytorch/pytorch#149029", kills_on=Condition(plan=_CONTROLLED), trace=Trace.STATE)
class IgnoresALaterPolicy(FullyShardEngine):
    """A policy set once the model is wrapped has no effect.

    Reported: the policy could not be changed once the model had been wrapped.
    """

    prepared_type = _PreparedSet


class _RecursiveUnit(ComposableUnit):
    def set_reshard_after_forward(self, *, is_on: bool) -> None:
        self._first.set_reshard_after_forward(is_on)


class _PreparedRecursive(PreparedFullyShard):
    unit_type = _RecursiveUnit


@mutant(
    after="pytorch/pytorch#124318",
    kills_on=Condition(plan=_CONTROLLED, because="a root without units tells nobody else"),
    trace=Trace.STATE,
)
class TellsAllWhatOneWasTold(FullyShardEngine):
    """A policy set on the root alone reaches the units inside it.

    Reported: a setter's argument that kept it from modules inside was not respected.
    """

    prepared_type = _PreparedRecursive


class _LazyUnit(ComposableUnit):
    def unshard(self) -> None:
        """Gather nothing."""

    def unshard_async(self) -> Callable[[], None]:
        return lambda: None


class _PreparedLazy(PreparedReference):
    unit_type = _LazyUnit


@mutant(after="deepspeedai/DeepSpeed#1069", kills_on=Condition(plan=_CONTROLLED), trace=Trace.STATE)
class GathersInForwardAlone(ReferenceEngine):
    """A call to gather a unit does nothing.

    Reported: gathers ahead of use were skipped, every one of them.
    """

    prepared_type = _PreparedLazy


class _EmptyHandedUnit(ComposableUnit):
    def unshard_async(self) -> Callable[[], None]:
        if not [*self._own_parameters()]:
            raise AttributeError("this unit has no gather that could be waited for")
        return super().unshard_async()


class _PreparedEmptyHanded(PreparedReference):
    unit_type = _EmptyHandedUnit


@mutant(
    after="facebookresearch/fairscale#441",
    kills_on=Condition(world_size=1, plan=_CONTROLLED, because="a root that owns parameters is gathered"),
    trace=Trace.CRASH,
)
class WaitsForNoGather(ReferenceEngine):
    """An asynchronous gather of a unit without parameters raises.

    Reported: a model all of whose parameters were its children's broke the wrapper.
    """

    prepared_type = _PreparedEmptyHanded


class _DeferringUnit(ComposableUnit):
    """Issues an asynchronous gather when somebody waits for it, on every other rank."""

    def unshard_async(self) -> Callable[[], None]:
        return self.unshard if dist.get_rank() % 2 else super().unshard_async()


class _PreparedDeferring(PreparedReference):
    unit_type = _DeferringUnit


@mutant(
    after="meta-pytorch/torchrec#4149",
    kills_on=Condition(
        plan=_CONTROLLED, because="with nothing between a gather and its wait, all ranks have one order"
    ),
    trace=Trace.COMMUNICATION,
)
class GathersWhenWaitedFor(ReferenceEngine):
    """Every other rank issues asynchronous gathers only when they are waited for.

    Reported: some ranks issued a collective early, others after another, until all stood still.
    """

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


@mutant(
    after="karpathy/nanochat#843",
    kills_on=Condition(steps=2, plan=_CONTROLLED, because="before the first gather there is none"),
    trace=Trace.NUMBERS,
)
class LeavesOthersRowsStale(ReferenceEngine):
    """An asynchronous gather leaves the rows of other ranks as they were before.

    Reported: memory of a gather under way was used again, so that of each matrix a rank had its own rows right and
    those of all others from before. Needs units that hold no other unit.
    """

    prepared_type = _PreparedStale


class _PreparedOneSided(PreparedReference):
    def _set_gradient_sync(self, *, is_on: bool) -> None:
        next(self._roots()).set_requires_gradient_sync(is_on)


@mutant(
    after="speechbrain/speechbrain#2010",
    kills_on=Condition(
        steps=2,
        microbatches=2,
        plan=_SEVERAL_ROOTS,
        because="the only microbatch is also the last; counts hold from the second step on",
    ),
    trace=Trace.COMMUNICATION,
)
class HoldsBackTheFirstRootAlone(ReferenceEngine):
    """Of several roots all but the first reduce in every microbatch.

    Reported: the loop that holds reductions back left off at the first module.
    """

    prepared_type = _PreparedOneSided
