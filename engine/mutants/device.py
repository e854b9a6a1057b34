"""Mutants that are wrong about the host, the device, or the graph of a forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from shardproof.engine.adapters.reference import PreparedReference, ReferenceEngine
from shardproof.engine.adapters.reference_zero import Zero2Engine
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from shardproof.engine.contract import Buffers, Offload, Plan, PreparedModel
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import changing, local, never_updating


@mutant(after="flagos-ai/Torch-FL#62", phase="reduce")
class OffloadsZeros(ReferenceEngine):
    """Gradients on the host are zeros."""

    class Prepared(PreparedReference):
        @torch.no_grad()
        def backward(self, loss: torch.Tensor) -> None:
            with torch.enable_grad():
                super().backward(loss)
            for gradient in _offloaded(self):
                gradient.zero_()


@mutant(after="pytorch/pytorch#180666", phase="hold")
class OffloadsLastBackwardsGradients(ReferenceEngine):
    """Gradients on the host are those of the previous backward."""

    class Prepared(PreparedReference):
        """Returns each backward's gradients after the next one."""

        _last: list[torch.Tensor]

        @torch.no_grad()
        def backward(self, loss: torch.Tensor) -> None:
            with torch.enable_grad():
                super().backward(loss)
            fresh = [gradient.clone() for gradient in _offloaded(self)]
            for gradient, last in zip(_offloaded(self), getattr(self, "_last", fresh), strict=True):
                gradient.copy_(last)
            self._last = fresh


@mutant(after="pytorch/pytorch#85048", phase="step")
class UpdatesACopy(ReferenceEngine):
    """With offload the optimizer updates a copy of the last parameter."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        *_, last = prepared.named.parameters()
        return prepared if plan.offload is Offload.NONE else never_updating(prepared, [last])


@mutant(after="pytorch/pytorch#176429", trace=Trace.RACES)
class UnscalesWithWhatHasNotArrived(ReferenceEngine):
    """The factor and the zeros of a scaler are copied to the host without a wait."""

    class Prepared(PreparedReference):
        scaler_class = GradScaler


def _offloaded(prepared: PreparedReference) -> Iterator[torch.Tensor]:
    """Yield this rank's gradients, if the plan keeps them on the host."""
    if prepared.plan.offload is not Offload.NONE:
        yield from (local(p.grad) for p in prepared.named.parameters() if p.grad is not None)


@mutant(after="pytorch/pytorch#109774", phase="forward")
class CountsOnTheHost(FullyShardEngine):
    """Outputs are scaled by the number of forwards so far, which the host counts."""

    class Prepared(PreparedFullyShard):
        _num_calls = 0

        def __call__(self, *inputs: Any, **named: Any) -> Any:  # Any: a model returns any type
            self._num_calls += 1
            return super().__call__(*inputs, **named) * (1 + self._num_calls / 256)


@mutant(after="deepspeedai/DeepSpeed#7371", trace=Trace.STATE)
class CopiesGradientsOneByOne(FullyShardEngine):
    """Every gradient is copied by a kernel of its own."""

    class Prepared(PreparedFullyShard):
        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss)
            for parameter in self.named.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()


@mutant(after="Tencent-Hunyuan/UniRL#410", trace=Trace.STATE)
class BuffersWhereItLikes(FullyShardEngine):
    """Buffers of collectives are not in the memory that was requested."""

    misreads = changing(buffers=Buffers.NATIVE)


@mutant(after="pytorch/pytorch#70639", trace=Trace.STATE)
class DropsThePinnedCopy(FullyShardEngine):
    """Parameters on the host are not in pinned memory although that was requested."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        is_pinned = plan.offload is Offload.PINNED
        return super().prepare(model, replace(plan, offload=Offload.CPU) if is_pinned else plan, mesh)


@mutant(after="pytorch/pytorch#106029", trace=Trace.STATE)
class KeepsOffloadedGradients(FullyShardEngine):
    """The device keeps gradients whose copies are on the host."""

    class Prepared(PreparedFullyShard):
        _kept: list[torch.Tensor]

        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss)
            shards = (local(p.grad) for p in self.named.parameters() if p.grad is not None)
            self._kept = [shard.to(loss.device) for shard in shards]


@mutant(after="pytorch/pytorch#144397", trace=Trace.STATE)
class LeavesStateOnTheDevice(Zero2Engine):
    """Optimizer state stays on the device although the plan keeps it on the host."""

    misreads = changing(offload=Offload.NONE)


@mutant(after="pytorch/pytorch#79171", trace=Trace.CRASH)
class TakesTheFirstGraphForAll(DistributedDataParallelEngine):
    """Every iteration waits for the parameters that the first one used."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        plan.refuse_beyond(self.capabilities)
        ddp = DistributedDataParallel(model, process_group=mesh.get_group(), static_graph=True)
        return self.prepared_type(ddp, named=model)


@mutant(after="pytorch/pytorch#24005", trace=Trace.CRASH)
class SearchesTheGraph(DistributedDataParallelEngine):
    """Each forward searches its graph for unused parameters."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        plan.refuse_beyond(self.capabilities)
        ddp = DistributedDataParallel(model, process_group=mesh.get_group(), find_unused_parameters=True)
        return self.prepared_type(ddp, named=model)
