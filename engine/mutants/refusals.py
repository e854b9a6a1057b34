"""Mutants that accept what they do not support."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from shardproof.engine.adapters.reference import ReferenceEngine
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine
from shardproof.engine.adapters.torch_replicate import ReplicateEngine
from shardproof.engine.contract import Capability, Cut, Plan, PreparedModel, Shard
from shardproof.engine.mutants.mutant import Trace, mutant


@mutant(after="Tencent-Hunyuan/UniRL#410", trace=Trace.REFUSAL)
class AcceptsEveryPlan(DistributedDataParallelEngine):
    """Plans beyond the declared capabilities are silently accepted."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        return PreparedDdp(DistributedDataParallel(model), named=model)


@mutant(after="Tencent-Hunyuan/UniRL#410", trace=Trace.COMMUNICATION)
class ReplicatesInsteadOfSharding(DistributedDataParallelEngine):
    """Parameters that should be sharded are replicated."""

    capabilities = frozenset({Capability.SHARD, Capability.ACCUMULATE})

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        plan.refuse_beyond(self.capabilities)
        ddp = DistributedDataParallel(model, process_group=mesh.get_group())
        return self.prepared_type(ddp, named=model)


@mutant(after="Tencent-Hunyuan/UniRL#410", trace=Trace.COMMUNICATION)
class CallsTheWholeItsChunks(ReplicatesInsteadOfSharding):
    """Every rank holds the whole of parameters that should be cut into uneven chunks."""

    class Prepared(PreparedDdp):
        cut = Cut.CHUNKS

        def local_parameters(self) -> Mapping[str, Shard]:
            whole = super().local_parameters()
            return {name: Shard.flat(s.tensor.flatten(), 0, s.global_shape) for name, s in whole.items()}


@mutant(after="facebookresearch/fairscale#1050", trace=Trace.STATE)
class ShowsSlicesOfWholes(ReplicatesInsteadOfSharding):
    """Every rank holds whole parameters, and reports slices."""

    class Prepared(PreparedDdp):
        """Reports this rank's rows of tensors that it holds whole."""

        def local_parameters(self) -> Mapping[str, Shard]:
            return {name: _rows(shard) for name, shard in super().local_parameters().items()}

        def local_gradients(self) -> Mapping[str, Shard | None]:
            return {name: shard and _rows(shard) for name, shard in super().local_gradients().items()}

        def local_optimizer_state(self) -> Mapping[str, Shard]:
            return {name: _rows(shard) for name, shard in super().local_optimizer_state().items()}


@mutant(after="pytorch/pytorch#194434", phase="reduce")
class ReducesAsComputedUnasked(ReferenceEngine):
    """Gradients are reduced in the compute dtype although they should be reduced in the parameters' own."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        return super().prepare(
            model, replace(plan, reduce_dtype=plan.reduce_dtype or plan.compute_dtype), mesh
        )


@mutant(after="pytorch/pytorch#126616", trace=Trace.COMMUNICATION)
class CallsUnitsThatOthersDoNot(FullyShardEngine):
    """Each rank gathers the units that its own forward calls, and ranks may call different ones."""

    capabilities = FullyShardEngine.capabilities | {Capability.RANK_DEPENDENT_UNITS}


@mutant(after="huggingface/trl#6862", trace=Trace.SILENCE)
class RefusesOnOneRank(DistributedDataParallelEngine):
    """One rank refuses a model in forward, and the others continue."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        if dist.get_rank() == 0 and any(p.dim() == 0 or p.numel() == 0 for p in model.parameters()):
            prepared.module.register_forward_pre_hook(_refuse)
        return prepared


@mutant(after="huggingface/trl#6862", trace=Trace.SILENCE)
class RefusesUnitsOnTheFirstRankAlone(ReferenceEngine):
    """Units that are named twice, or have no forward, are refused on the first rank and left out on the others."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        if dist.get_rank() == 0:
            return super().prepare(model, plan, mesh)
        units = [
            u for u in dict.fromkeys(plan.units) if not isinstance(model.get_submodule(u), nn.ModuleList)
        ]
        return super().prepare(model, replace(plan, units=tuple(units)), mesh)


@mutant(after="pytorch/pytorch#137382", phase="prepare")
class ReadsColumnsAsRows(ReferenceEngine):
    """A column-major parameter is read as row-major."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        for parameter in model.parameters():
            parameter.data = parameter.data.as_strided(parameter.shape, torch.empty(parameter.shape).stride())
        return super().prepare(model, plan, mesh)


@mutant(after="pytorch/pytorch#73547", trace=Trace.SILENCE)
class SkipsTheComparisonOfRanks(ReplicateEngine):
    """Models that differ between ranks are accepted as equal."""

    capabilities = ReplicateEngine.capabilities | {Capability.COMPARES_RANKS}


def _rows(whole: Shard) -> Shard:
    if not whole.global_shape:
        return whole
    num_rows, rank = whole.global_shape[0], dist.get_rank()
    chunk = -(-num_rows // dist.get_world_size())
    start, end = min(num_rows, rank * chunk), min(num_rows, (rank + 1) * chunk)
    offsets = (start, *whole.offsets[1:])
    return Shard(tensor=whole.tensor[start:end], offsets=offsets, global_shape=whole.global_shape)


def _refuse(*_: object) -> None:
    raise ValueError("a parameter that cannot be cut")
