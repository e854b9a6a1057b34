"""Mutants that ignore a caller's control of single units, or use a value too early."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.engine.adapters.composable import ComposableUnit, members
from shardproof.engine.adapters.reference import PreparedReference, ReferenceEngine
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from shardproof.engine.contract import (
    ComposableApi,
    Plan,
    UnitHandle,
)
from shardproof.engine.mutants.fsdp2_insides import reference_groups
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import Stale, in_each
from shardproof.engine.reference.param_group import FSDPParamGroup


class _UnfreedUnit(ComposableUnit):
    def reshard(self) -> None:
        """Change nothing."""


@mutant(after="meta-pytorch/torchtune#2483", trace=Trace.STATE)
class ReshardsTheRootAlone(ReferenceEngine):
    """A call to free a unit has no effect on units inside the root."""

    class Prepared(PreparedReference):
        def units(self) -> Mapping[str, UnitHandle]:
            units = dict(super().units())
            for name in self.plan.units or ("",):
                units[name] = _UnfreedUnit(members(self.module, name), self.api)
            return units


@mutant(after="pytorch/pytorch#149029", trace=Trace.STATE)
class IgnoresALaterPolicy(FullyShardEngine):
    """A policy that is set after wrapping has no effect."""

    class Unit(ComposableUnit):
        def set_reshard_after_forward(self, *, is_on: bool) -> None:
            """Change nothing."""


@mutant(after="pytorch/pytorch#124318", trace=Trace.STATE)
class TellsAllWhatOneWasTold(FullyShardEngine):
    """A policy that is set only on the root also affects the units inside it."""

    class Unit(ComposableUnit):
        def set_reshard_after_forward(self, *, is_on: bool) -> None:
            self._first.set_reshard_after_forward(is_on)


@mutant(after="pytorch/pytorch#149029", phase="gather")
class KeepsPartsUnderAnotherPolicy(ReferenceEngine):
    """After a policy change between forward and backward, units are gathered from parts cut for other ranks."""

    spoil = in_each(reference_groups, "set_subgroup", lambda group: _keeping_parts(group))


def _keeping_parts(group: FSDPParamGroup) -> Callable[[dist.ProcessGroup | None], None]:
    honest = group.set_subgroup

    def set_subgroup(chosen: dist.ProcessGroup | None) -> None:
        part, ranks = group._kept_shard, group._subgroup
        if part is None or ranks is None:
            honest(chosen)
        else:
            group._kept_shard = part[: part.numel() * ranks.size() // group.mesh.shard_size]
            group._subgroup = group.mesh.shard_group

    return set_subgroup


@mutant(after="deepspeedai/DeepSpeed#1069", trace=Trace.STATE)
class GathersInForwardAlone(ReferenceEngine):
    """A call to gather a unit does nothing."""

    class Unit(ComposableUnit):
        def unshard(self) -> None:
            """Gather nothing."""

        def unshard_async(self) -> Callable[[], None]:
            return lambda: None


@mutant(after="facebookresearch/fairscale#441", trace=Trace.CRASH)
class WaitsForNoGather(ReferenceEngine):
    """An asynchronous gather of a unit without parameters raises."""

    class Unit(ComposableUnit):
        def unshard_async(self) -> Callable[[], None]:
            if not [*self._own_parameters()]:
                raise AttributeError("this unit has no gather that could be waited for")
            return super().unshard_async()


@mutant(after="meta-pytorch/torchrec#4149", trace=Trace.COMMUNICATION)
class GathersWhenWaitedFor(ReferenceEngine):
    """Every other rank issues asynchronous gathers only when they are waited for."""

    class Unit(ComposableUnit):
        """Issues an asynchronous gather only at its wait, on every other rank."""

        def unshard_async(self) -> Callable[[], None]:
            return self.unshard if dist.get_rank() % 2 else super().unshard_async()


class _StaleUnit(ComposableUnit):
    def __init__(
        self, modules: tuple[nn.Module, ...], api: ComposableApi, known: dict[str, torch.Tensor]
    ) -> None:
        super().__init__(modules, api)
        self._known = known

    def unshard_async(self) -> Callable[[], None]:
        wait = super().unshard_async()

        def wait_and_spoil() -> None:
            wait()
            self._spoil()

        return wait_and_spoil

    @torch.no_grad()
    def _spoil(self) -> None:
        """Restore the previous rows of all ranks but this one."""
        num_ranks = dist.get_world_size()
        for name, parameter in self._first.named_parameters():
            if isinstance(parameter, DTensor):
                continue
            fresh = parameter.detach().clone()
            # .data, whose writes autograd does not see: reused memory shows no write either.
            for rank, rows in enumerate(parameter.data.chunk(num_ranks)):
                if rank != dist.get_rank() and name in self._known:
                    rows.copy_(self._known[name].chunk(num_ranks)[rank])
            self._known[name] = fresh


@mutant(after="karpathy/nanochat#843", trace=Trace.NUMBERS, phase="gather")
class LeavesOthersRowsStale(ReferenceEngine):
    """An asynchronous gather leaves the rows of other ranks at their previous values.

    Needs units that contain no other unit.
    """

    class Prepared(PreparedReference):
        """Stores each parameter's values from the previous asynchronous gather."""

        def __init__(self, module: nn.Module, plan: Plan, api: ComposableApi) -> None:
            super().__init__(module, plan, api)
            self._known: dict[str, torch.Tensor] = {}

        def units(self) -> Mapping[str, UnitHandle]:
            names = super().units()
            return {name: _StaleUnit(members(self.module, name), self.api, self._known) for name in names}


@mutant(after="speechbrain/speechbrain#2010", trace=Trace.COMMUNICATION)
class HoldsBackTheFirstRootAlone(ReferenceEngine):
    """Of several roots all but the first reduce in every microbatch."""

    class Prepared(PreparedReference):
        def _set_gradient_sync(self, *, is_on: bool) -> None:
            next(self._roots()).set_requires_gradient_sync(is_on)


@mutant(after="NVIDIA/Megatron-LM#663", phase="gather")
class ComputesWithStaleParameters(FullyShardEngine):
    """Forward and backward use the parameters of the previous step."""

    class Prepared(Stale, PreparedFullyShard):
        pass


@mutant(after="pytorch/pytorch#94258", phase="hold")
class KeepsOneOldGradient(DistributedDataParallelEngine):
    """Clearing the gradients does not clear that of the last parameter."""

    class Prepared(PreparedDdp):
        def zero_grad(self, *, set_to_none: bool) -> None:
            *_, last = self.named.parameters()
            kept = None if last.grad is None else last.grad.clone()
            super().zero_grad(set_to_none=set_to_none)
            last.grad = kept
