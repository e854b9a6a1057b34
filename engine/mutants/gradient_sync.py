"""Mutants that synchronise, accumulate or hold back gradients never, not everywhere, or too often, or lose them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardproof.engine.adapters.composable import ComposableUnit
from shardproof.engine.adapters.reference import ReferenceEngine
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from shardproof.engine.contract import Plan, PreparedModel
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import (
    Forgetful,
    after,
    changing,
    holding_nothing_back,
    is_last_rank,
    leave_out_of_ddp,
)
from shardproof.engine.reference.fsdp_state import state_of


@mutant(after="pytorch/pytorch#109774", phase="reduce")
class NeverSynchronises(DistributedDataParallelEngine):
    """Gradients stay on the rank that computed them."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        assert isinstance(prepared.module, DistributedDataParallel)
        prepared.module.require_backward_grad_sync = False
        return prepared


@mutant(after="verl-project/verl#6176", trace=Trace.COMMUNICATION)
class AgreesOnEachMicrobatch(DistributedDataParallelEngine):
    """Ranks reduce a number before each forward that trains, though one of them may have fewer microbatches."""

    class Prepared(PreparedDdp):
        def __call__(self, *inputs: Any, **named: Any) -> Any:
            if torch.is_grad_enabled():
                dist.all_reduce(torch.ones(1), group=self.module.process_group)
            return super().__call__(*inputs, **named)


@mutant(after="facebookresearch/fairscale#1041", trace=Trace.COMMUNICATION)
class BroadcastsBuffersInEachForward(DistributedDataParallelEngine):
    """Buffers are broadcast before each forward, also of a microbatch whose gradients are held back."""

    class Prepared(PreparedDdp):
        def __call__(self, *inputs: Any, **named: Any) -> Any:
            assert isinstance(self.module, DistributedDataParallel)
            self.module.require_forward_param_sync = True
            return super().__call__(*inputs, **named)


@mutant(after="deepspeedai/DeepSpeed#1214", phase="reduce")
class LeavesOutWhatFillsABucket(DistributedDataParallelEngine):
    """A gradient as large as a bucket stays on the rank that computed it."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        assert isinstance(prepared.module, DistributedDataParallel)
        limit = plan.bucket_bytes
        group = mesh.get_group()

        # Any: buckets have no public type.
        def reduce(bucket: Any) -> torch.futures.Future[torch.Tensor]:
            gradients: torch.Tensor = bucket.buffer()
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            if limit is None or len(bucket.gradients()) > 1:
                dist.all_reduce(gradients, group=group)
                gradients.div_(group.size())
            done.set_result(gradients)
            return done

        prepared.module.register_comm_hook(None, lambda state, bucket: reduce(bucket))
        return prepared


@mutant(after="facebookresearch/fairscale#517", phase="reduce")
class LeavesOutTheLastOfABucket(DistributedDataParallelEngine):
    """The last of several gradients in a bucket that is not the last bucket stays on the rank that computed it."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        assert isinstance(prepared.module, DistributedDataParallel)
        group = mesh.get_group()

        # Any: buckets have no public type.
        def reduce(bucket: Any) -> torch.futures.Future[torch.Tensor]:
            gradients: torch.Tensor = bucket.buffer()
            last = bucket.gradients()[-1]
            own = last.clone()
            dist.all_reduce(gradients, group=group)
            gradients.div_(group.size())
            if len(bucket.gradients()) > 1 and not bucket.is_last():
                last.copy_(own)
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(gradients)
            return done

        prepared.module.register_comm_hook(None, lambda state, bucket: reduce(bucket))
        return prepared


@mutant(after="deepspeedai/DeepSpeed#7415", trace=Trace.COMMUNICATION)
class ReducesOneByOneAfterTheFirstBucket(DistributedDataParallelEngine):
    """After the first bucket of a training, each gradient is reduced alone."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        assert isinstance(prepared.module, DistributedDataParallel)
        group, is_first = mesh.get_group(), [True]

        # Any: buckets have no public type.
        def reduce(bucket: Any) -> torch.futures.Future[torch.Tensor]:
            whole: torch.Tensor = bucket.buffer()
            for part in [whole] if is_first.pop() else bucket.gradients():
                dist.all_reduce(part, group=group)
            is_first.append(False)
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(whole.div_(group.size()))
            return done

        prepared.module.register_comm_hook(None, lambda state, bucket: reduce(bucket))
        return prepared


@mutant(after="pytorch/pytorch#48880", trace=Trace.COMMUNICATION)
class IgnoresTheSizeOfBuckets(DistributedDataParallelEngine):
    """Buckets have a size of the engine's choice."""

    misreads = changing(bucket_bytes=None)


@mutant(after="NVIDIA/cosmos-framework#161", trace=Trace.COMMUNICATION)
class SynchronisesEveryMicrobatch(FullyShardEngine):
    """Gradients are reduced after each microbatch although the plan accumulates."""

    spoil = holding_nothing_back


@mutant(after="deepspeedai/DeepSpeed#1801", phase="step")
class DriftsByOneBit(DistributedDataParallelEngine):
    """One weight of one replica is off by a bit after each step."""

    class Prepared(PreparedDdp):
        def step(self) -> None:
            super().step()
            if is_last_rank() and dist.get_rank() > 0:
                first = next(self.named.parameters()).detach().view(-1)
                first[0] = torch.nextafter(first[0], torch.tensor(torch.inf))


@mutant(after="NVIDIA/Megatron-LM#7186", phase="hold")
class KeepsOnlyTheLastMicrobatch(DistributedDataParallelEngine):
    """Each backward discards the gradients of the microbatches before it."""

    class Prepared(Forgetful, PreparedDdp):
        pass


@mutant(after="NVIDIA/Megatron-LM#6660", phase="hold")
class DoublesGradientsEveryMicrobatch(DistributedDataParallelEngine):
    """Each backward doubles the gradients accumulated before it."""

    class Prepared(PreparedDdp):
        def backward(self, loss: torch.Tensor) -> None:
            with torch.no_grad():
                for parameter in self.named.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(2)
            super().backward(loss)


@mutant(after="pytorch/pytorch#90546", trace=Trace.CRASH)
class AssignsWholeGradientsToShards(FullyShardEngine):
    """After an accumulation a whole gradient is assigned to a shard."""

    class Prepared(PreparedFullyShard):
        _has_accumulated = False

        @contextmanager
        def accumulating(self) -> Iterator[None]:
            with super().accumulating():
                yield
            self._has_accumulated = True

        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss)
            if not self._has_accumulated:
                return
            for parameter in self.owned_parameters().values():
                if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
                    shard = nn.Parameter(parameter.to_local().detach())
                    shard.grad = parameter.grad.full_tensor()


@mutant(after="pytorch/pytorch#76553", trace=Trace.COMMUNICATION)
class GathersOnceMoreInBackward(FullyShardEngine):
    """Backward gathers one unit's parameters one time more than needed."""

    class Prepared(PreparedFullyShard):
        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss)
            # The last unit in the order of modules: the root may have no parameters of its own to gather.
            *_, unit = (m for m in self.module.modules() if isinstance(m, FSDPModule))
            unit.unshard()
            unit.reshard()


@mutant(after="NVIDIA/Megatron-LM#6660", trace=Trace.COMMUNICATION)
class CommunicatesAlone(FullyShardEngine):
    """A rank that is alone makes collectives with itself."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared, group = super().prepare(model, plan, mesh), mesh.get_group(mesh.ndim - 1)
        if group.size() == 1:
            number = torch.zeros((), device=mesh.device_type)
            after(prepared, "backward", lambda _: dist.all_reduce(number, group=group))
        return prepared


@mutant(after="pytorch/pytorch#31413", phase="reduce")
class KeepsItsOwnSparseGradients(DistributedDataParallelEngine):
    """The sum of sparse gradients is computed and never written back."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        leave_out_of_ddp(model, [name for name, _ in _sparse_parameters(model)])
        return super().prepare(model, plan, mesh)


@mutant(after="deepspeedai/DeepSpeed#206", phase="hold")
class ClearsNoSparseGradients(DistributedDataParallelEngine):
    """Where gradients are cleared to zeros, sparse ones stay and add up."""

    class Prepared(PreparedDdp):
        def zero_grad(self, *, set_to_none: bool) -> None:
            gradients = [(p, p.grad) for p in self.module.parameters() if p.grad is not None]
            kept = [
                (p, gradient.clone()) for p, gradient in gradients if gradient.is_sparse and not set_to_none
            ]
            super().zero_grad(set_to_none=set_to_none)
            for p, gradient in kept:
                p.grad = gradient


@mutant(after="pytorch/pytorch#61814", phase="backward")
class SumsSparseGradients(DistributedDataParallelEngine):
    """Sparse gradients are summed over ranks, while the others are averaged."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        _change(model, lambda gradient: gradient * mesh.size())
        return super().prepare(model, plan, mesh)


@mutant(after="dmlc/dgl#2596", phase="backward")
class CountsEachRowOnce(DistributedDataParallelEngine):
    """If a batch uses a row twice, only the gradient of the last use is kept."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        _change(model, _last_of_each_row)
        return super().prepare(model, plan, mesh)


@mutant(after="pytorch/pytorch#87497", trace=Trace.CRASH)
class RefusesSparseGradientsWithoutRows(DistributedDataParallelEngine):
    """A rank whose batch uses no row of a table raises."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        _change(model, _with_rows)
        return super().prepare(model, plan, mesh)


def _with_rows(gradient: torch.Tensor) -> torch.Tensor:
    if not gradient._nnz():
        raise RuntimeError("a message without bytes")
    return gradient


def _last_of_each_row(gradient: torch.Tensor) -> torch.Tensor:
    rows, values = gradient._indices()[0], gradient._values()
    kept = list({int(row): place for place, row in enumerate(rows)}.values())
    return torch.sparse_coo_tensor(rows[kept].unsqueeze(0), values[kept], gradient.shape)


def _change(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change each rank's sparse gradient before it is reduced."""
    for _, parameter in _sparse_parameters(model):
        parameter.register_hook(change)  # type: ignore[no-untyped-call]  # torch's


def _sparse_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.sparse:
            yield from (
                (f"{name}.{of_table}", parameter) for of_table, parameter in module.named_parameters()
            )


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


@mutant(after="NVIDIA/Megatron-LM#7186", phase="hold")
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
