"""Mutants that hold back other reductions than requested, or meanwhile lose or keep what they must not."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.composable import ComposableUnit
from shardproof.engine.adapters.reference import ReferenceEngine
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine
from shardproof.engine.contract import Plan, PreparedModel
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.plans import changing
from shardproof.engine.reference.fsdp_state import state_of

_MANY = 1000  # more reductions than any model here has


@mutant(after="Haian-Jin/LVSM#22", trace=Trace.COMMUNICATION)
class IgnoresSingleHolds(ReferenceEngine):
    """A single unit that was set to hold its reduction back reduces."""

    class Unit(ComposableUnit):
        def set_gradient_sync(self, *, is_on: bool) -> None:
            pass


@mutant(after="huggingface/accelerate#2790", trace=Trace.COMMUNICATION)
class HoldsTheWholeTreeBack(ReferenceEngine):
    """If the root holds its reduction back, so do all units inside."""

    class Unit(ComposableUnit):
        def set_gradient_sync(self, *, is_on: bool) -> None:
            for module in self._modules:
                module.set_requires_gradient_sync(is_on)


@mutant(after="NVIDIA/Megatron-LM#7186")
class LosesWhatItHeldBack(ReferenceEngine):
    """A unit that was held back drops the microbatches before the last."""

    class Unit(ComposableUnit):
        def set_gradient_sync(self, *, is_on: bool) -> None:
            super().set_gradient_sync(is_on=is_on)
            if is_on:
                unit = state_of(self._first)
                for group in () if unit is None else unit.param_groups:
                    group.drop_gradients()


@mutant(after="NVIDIA/Megatron-LM#7186", trace=Trace.COMMUNICATION)
class ReducesReplicasAllTheSame(ReferenceEngine):
    """A unit that was set to reduce only within its replica reduces across replicas."""

    class Unit(ComposableUnit):
        def set_replica_sync(self, *, is_on: bool) -> None:
            pass


@mutant(after="deepspeedai/DeepSpeed#7188", trace=Trace.COMMUNICATION)
class ReducesWithoutBound(ReferenceEngine):
    """Reductions start without a limit on how many hold their input."""

    misreads = changing(max_reduce_buffers=_MANY)


@mutant(after="Tencent-Hunyuan/UniRL#410", trace=Trace.SILENCE)
class AcceptsNoReduceBuffers(FullyShardEngine):
    """A limit of no reduction is accepted."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, with a bound that can be kept."""
        bound = None if plan.max_reduce_buffers is None else max(1, plan.max_reduce_buffers)
        return super().prepare(model, replace(plan, max_reduce_buffers=bound), mesh)


@mutant(after="facebookresearch/fairscale#791", trace=Trace.COMMUNICATION)
class TakesAllUnitsForOne(ReferenceEngine):
    """All parameters form one group, whatever the units are."""

    misreads = changing(units=())
