"""Mutants that clip by the wrong norm, on the wrong ranks, or not at all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardproof.engine.adapters.reference import PreparedReference, ReferenceEngine
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from shardproof.engine.contract import Roots
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.reference import clip_grad_norm_


def _joint_norm(tensors: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm of all tensors' elements together, 0 if there are none (0-dimensional)."""
    elements = torch.cat([*(tensor.flatten() for tensor in tensors), torch.zeros(1)])
    norm: torch.Tensor = torch.linalg.vector_norm(elements, norm_type)
    return norm


class _PreparedOwnClipping(PreparedFullyShard):
    """Clips local shards by a norm that `norm` combines from local norms, and a scale that `scale` computes from it."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
        total = self.norm(norm_type)
        for gradient in self.local():
            gradient.mul_(self.scale(max_norm, total))
        return total

    def norm(self, norm_type: float) -> float:
        """Combine the norms of this rank's shards over the shard axis; a rank may have no shard."""
        own = self.own_norm(norm_type)
        group = self.mesh().get_group(self.mesh().ndim - 1)
        if math.isinf(norm_type):
            dist.all_reduce(own, op=dist.ReduceOp.MAX, group=group)
            return float(own)
        power = own**norm_type
        dist.all_reduce(power, group=group)
        return float(power ** (1 / norm_type))

    def scale(self, max_norm: float, total: float) -> float:
        return min(1.0, max_norm / (total + 1e-6))

    def own_norm(self, norm_type: float) -> torch.Tensor:
        """Return the norm of this rank's shards."""
        return _joint_norm([*self.local()], norm_type)

    def local(self) -> Iterator[torch.Tensor]:
        """Return this rank's shards of all gradients."""
        for parameter in self.named.parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                yield gradient.to_local().detach()

    def mesh(self) -> DeviceMesh:
        mesh = next(p.device_mesh for p in self.named.parameters() if isinstance(p, DTensor))
        assert isinstance(mesh, DeviceMesh)
        return mesh


@mutant(after="pytorch/pytorch#170862", phase="clip")
class ClipsByTheLocalNorm(FullyShardEngine):
    """Each rank clips its shards by their own norm."""

    class Prepared(_PreparedOwnClipping):
        def norm(self, norm_type: float) -> float:
            return float(self.own_norm(norm_type))


@mutant(after="deepspeedai/DeepSpeed#8475", phase="clip")
class AveragesTheNormsOfExperts(ReferenceEngine):
    """The norm contains the mean over ranks that have different experts, where it should contain all of them."""

    class Prepared(PreparedReference):
        def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
            gradients = {name: p.grad for name, p in self.owned_parameters().items() if p.grad is not None}
            experts = [gradients[name] for name in self.plan.experts]
            ratio = self.plan.expert_parallel ** (1 / norm_type)
            torch._foreach_div_(experts, ratio)
            norm = super().clip_grad_norm_(math.inf, norm_type)
            torch._foreach_mul_(experts, ratio)
            torch._foreach_mul_([*gradients.values()], min(1.0, max_norm / norm))
            return norm


@mutant(after="ByteDance-Seed/VeOmni#184", phase="clip")
class CountsTheNormOncePerReplica(FullyShardEngine):
    """The norm counts every parameter once for each replica."""

    class Prepared(_PreparedOwnClipping):
        def norm(self, norm_type: float) -> float:
            num_replicas = self.mesh().size(0) if self.mesh().ndim > 1 else 1
            return float(super().norm(norm_type) * num_replicas ** (1 / norm_type))


@mutant(after="mindspore-ai/hyper-parallel#526", phase="clip")
class CountsReplicatedUnitsOnEachRank(ReferenceEngine):
    """The norm counts units that are replicated beside sharded ones once for each rank."""

    class Prepared(PreparedReference):
        def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
            parameters = list(self.module.parameters())
            total, of_replicas = (
                float(clip_grad_norm_(chosen, math.inf, norm_type))
                for chosen in (parameters, [p for p in parameters if _is_whole(p)])
            )
            if not math.isinf(norm_type) and of_replicas < total:
                again = (dist.get_world_size() - 1) * of_replicas**norm_type
                total = (total**norm_type + again) ** (1 / norm_type)
            nn.utils.clip_grads_with_norm_(parameters, max_norm, torch.tensor(total))
            return total


def _is_whole(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor) and all(isinstance(p, Replicate) for p in parameter.placements)


@mutant(after="meta-pytorch/torchrec#3199", phase="clip")
class TakesTheRootOfAMaximum(FullyShardEngine):
    """The norm of infinite order is the root of a maximum."""

    class Prepared(_PreparedOwnClipping):
        def norm(self, norm_type: float) -> float:
            honest = super().norm(norm_type)
            return float(honest ** (1 / norm_type)) if math.isinf(norm_type) else honest


@mutant(after="pytorch/pytorch#63881", phase="clip")
class ReducesIntoItsZero(FullyShardEngine):
    """A rank without shards contributes the largest norm of earlier steps."""

    class Prepared(_PreparedOwnClipping):
        def own_norm(self, norm_type: float) -> torch.Tensor:
            return super().own_norm(norm_type) if any(g.numel() for g in self.local()) else self.zero

        @cached_property
        def zero(self) -> torch.Tensor:
            """The norm of a rank without shards, made once: the maximum is taken in place, and stays here."""
            return torch.zeros(())


@mutant(after="NVIDIA-NeMo/Automodel#2875", trace=Trace.COMMUNICATION)
class AddsUpNormsOneByOne(FullyShardEngine):
    """The norm of each parameter is reduced separately."""

    class Prepared(PreparedFullyShard):
        def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
            parameters = list(self.named.parameters())
            norms = [
                nn.utils.get_total_norm(
                    [p.grad for p in parameters[i : i + 1] if p.grad is not None], norm_type
                )
                for i in range(len(parameters))
            ]
            whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
            total = torch.linalg.vector_norm(torch.stack(whole), norm_type)
            nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
            return float(total)


@mutant(after="deepspeedai/DeepSpeed#5150", phase="clip")
class NeverClips(FullyShardEngine):
    """The norm is right, and gradients are not scaled by it."""

    class Prepared(_PreparedOwnClipping):
        def scale(self, max_norm: float, total: float) -> float:
            return 1.0


@mutant(after="DingfanChen/GS-WGAN#5", phase="clip")
class ScalesSmallGradientsUp(FullyShardEngine):
    """Gradients below the limit are scaled up to it."""

    class Prepared(_PreparedOwnClipping):
        def scale(self, max_norm: float, total: float) -> float:
            return max_norm / (total + 1e-6)


@mutant(after="pytorch/pytorch#87401", trace=Trace.CRASH)
class ReturnsNoNorm(FullyShardEngine):
    """Clipping does not return the norm."""

    class Prepared(PreparedFullyShard):
        def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
            super().clip_grad_norm_(max_norm, norm_type)
            return None  # type: ignore[return-value]  # the fault


@mutant(after="deepspeedai/DeepSpeed#1801", phase="clip")
class ClipsOnOneRank(DistributedDataParallelEngine):
    """Only one rank clips."""

    class Prepared(PreparedDdp):
        def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
            if dist.get_rank() == 0:
                return super().clip_grad_norm_(max_norm, norm_type)
            gradients = [p.grad for p in self.named.parameters() if p.grad is not None]
            return float(nn.utils.get_total_norm(gradients, norm_type))


@mutant(after="pytorch/pytorch#90028", phase="clip")
class ClipsByANormInFewBits(ReferenceEngine):
    """The norm by which gradients are clipped has the few bits in which they were reduced."""

    class Prepared(PreparedReference):
        def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
            dtype = self.plan.reduction_dtype
            if dtype is None or dtype.itemsize > 2:
                return super().clip_grad_norm_(max_norm, norm_type)
            norm = float(torch.tensor(super().clip_grad_norm_(math.inf, norm_type), dtype=dtype))
            for gradient in (p.grad for p in self.owned_parameters().values() if p.grad is not None):
                gradient.mul_(min(1.0, max_norm / norm))
            return norm


@mutant(after="nvidia-cosmos/cosmos-rl#120", phase="clip")
class ClipsEachRootByItsOwnNorm(ReferenceEngine):
    """The norm is that of all gradients, and each root's are clipped by their own."""

    class Prepared(PreparedReference):
        def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
            if self.plan.roots is Roots.MODEL:
                return super().clip_grad_norm_(max_norm, norm_type)
            total = super().clip_grad_norm_(math.inf, norm_type)
            for root in self._roots():
                clip_grad_norm_(root.parameters(), max_norm, norm_type)
            return total


@mutant(after="deepspeedai/DeepSpeed#7171", trace=Trace.STATE)
class MakesNanOfAnInfiniteNorm(ReferenceEngine):
    """A norm that is infinite is returned as NaN."""

    class Prepared(PreparedReference):
        def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
            norm = super().clip_grad_norm_(max_norm, norm_type)
            return norm if math.isfinite(norm) else math.nan


@mutant(after="horovod/horovod#1099", trace=Trace.COMMUNICATION)
class ReducesAgainOnceClipped(DistributedDataParallelEngine):
    """Gradients that have been clipped are reduced once more."""

    class Prepared(PreparedDdp):
        def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
            norm = super().clip_grad_norm_(max_norm, norm_type)
            for gradient in (p.grad for p in self.module.parameters() if p.grad is not None):
                dist.all_reduce(gradient)
                gradient.div_(dist.get_world_size())
            return norm
