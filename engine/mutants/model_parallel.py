"""Mutants that fail where data parallelism meets sharded tensors, or the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from types import MethodType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from shardproof.engine.adapters.reference import PreparedReference, ReferenceEngine
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from shardproof.engine.contract import Plan, PreparedModel, shard_of
from shardproof.engine.mutants.fsdp2_insides import reference_parameters
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import in_each, in_place_of
from shardproof.engine.reference.parameter import FSDPParam
from shardproof.engine.reference.torch_private import local_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """The number of pieces along the tensor-parallel axis, and which of them this rank has."""

    num_pieces: int
    index: int


@mutant(after="pytorch/torchtitan#1551", phase="reduce")
class ScalesByTheTensorRanks(ReferenceEngine):
    """Gradients of tensor-parallel parameters are multiplied by the number of pieces."""

    @staticmethod
    def spoil(prepared: PreparedModel) -> PreparedModel:
        for parameter in prepared.module.parameters():
            if (cut := _tensor_cut(parameter)) is not None:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]  # torch leaves it so
                    partial(_scale, cut.num_pieces)
                )
        return prepared


@mutant(after="pytorch/torchtitan#1551", phase="reduce")
class ScalesExpertsByTheirRanks(ReferenceEngine):
    """Gradients of experts are multiplied by the number of ranks that share them."""

    class Prepared(PreparedReference):
        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss)
            for name in self.plan.experts:
                gradient = self.named.get_parameter(name).grad
                if gradient is not None:
                    gradient.mul_(self.plan.expert_parallel)


@mutant(after="pytorch/torchtitan#1551", phase="reduce")
class MixesExpertsUp(FullyShardEngine):
    """Gradients of experts are averaged over ranks that hold other experts."""

    class Prepared(PreparedFullyShard):
        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss)
            for name in self.plan.experts:
                gradient = self.named.get_parameter(name).grad
                if isinstance(gradient, DTensor):
                    dist.all_reduce(
                        gradient.to_local(), dist.ReduceOp.AVG, gradient.device_mesh.get_group("expert")
                    )


@mutant(after="THUDM/slime#1366", phase="reduce")
class KeepsNormsOnTheirTensorRank(ReferenceEngine):
    """Gradients of norms are not reduced over the tensor axis, whose ranks have different rows."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        for module in prepared.module.modules():
            if isinstance(module, nn.LayerNorm) and isinstance(module.weight, DTensor):
                module.forward = MethodType(_norm_alone, module)  # type: ignore[method-assign]  # of this one
        return prepared


@mutant(after="deepspeedai/DeepSpeed#1801", phase="clip")
class ClipsOnOneTensorRank(FullyShardEngine):
    """Gradients are clipped only on the first rank of the tensor axis."""

    class Prepared(PreparedFullyShard):
        def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
            cuts = (_tensor_cut(p) for p in self.named.parameters())
            is_idle = any(cut.index > 0 for cut in cuts if cut is not None)
            return super().clip_grad_norm_(torch.inf if is_idle else max_norm, norm_type)


@mutant(after="pytorch/torchtitan#4593", phase="reduce")
class LosesTheLastRowsOfUnevenPieces(FullyShardEngine):
    """The last of the rows that both axes cut unevenly have no gradient."""

    class Prepared(PreparedFullyShard):
        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss)
            for parameter in self.named.parameters():
                if isinstance(parameter.grad, DTensor) and (num_cuts := _cuts_of_rows(parameter.grad)) > 2:
                    known = parameter.shape[0] // num_cuts * num_cuts
                    first = shard_of(parameter.grad).offsets[0]
                    parameter.grad.to_local()[max(known - first, 0) :].zero_()


@mutant(after="pytorch/torchtitan#1483", phase="prepare")
class SwapsTheCutsOfOneDim(FullyShardEngine):
    """Rows that both axes cut are placed as if the data axis had cut them first."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        for parameter in prepared.module.parameters():
            cut, data = _tensor_cut(parameter), parameter.detach()
            if isinstance(data, DTensor) and cut is not None and _cuts_of_rows(data) > cut.num_pieces:
                _swap_cuts(data, mesh, cut)
        return prepared


@mutant(after="gabrieldemarmiesse/torch-mojo-backend#426", phase="gather")
class ComputesWithTheMemoryOfBefore(ReferenceEngine):
    """Whole tensors that a tensor axis has cut stay in their memory when the model is cast and back."""

    spoil = in_each(reference_parameters, "_init_from", lambda parameter: _keeping_memory(parameter))


@mutant(after="NVIDIA/Megatron-LM#1012", phase="hold")
class ReducesBeforeTheLastBackward(DistributedDataParallelEngine):
    """In a pipeline the backward after the last forward is reduced, and later ones are not."""

    class Prepared(PreparedDdp):
        def pipelined(self) -> None:  # type: ignore[override]  # the fault: what the honest one hands out, it keeps
            return None


@mutant(after="NVIDIA/cosmos-framework#161", trace=Trace.COMMUNICATION)
class ReducesEveryMicrobatchOfAPipeline(ReferenceEngine):
    """In a pipeline gradients are reduced after each microbatch."""

    class Prepared(PreparedReference):
        @contextmanager
        def accumulating(self) -> Iterator[None]:
            if self.plan.pipeline_stages > 1:
                yield
                return
            with super().accumulating():
                yield


def _tensor_cut(parameter: torch.Tensor) -> _Cut | None:
    """Return how the tensor-parallel axis cuts a parameter; None if it does not."""
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    names, coordinate = mesh.mesh_dim_names or (), mesh.get_coordinate()
    if "tensor" not in names or coordinate is None:
        return None
    axis = names.index("tensor")
    if isinstance(parameter.placements[axis], Replicate):
        return None
    return _Cut(num_pieces=mesh.size(axis), index=coordinate[axis])


def _scale(factor: int, parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(factor)


def _cuts_of_rows(parameter: DTensor) -> int:
    """Return into how many pieces all axes together cut the first dim."""
    sizes = (parameter.device_mesh.size(axis) for axis in range(parameter.device_mesh.ndim))
    placements = zip(parameter.placements, sizes, strict=True)
    return prod(size for placement, size in placements if getattr(placement, "dim", None) == 0)


def _swap_cuts(parameter: DTensor, mesh: DeviceMesh, cut: _Cut) -> None:
    """Copy the piece that a rank would have in the other order; if its size differs, leave it."""
    whole = parameter.full_tensor()
    mine = whole.tensor_split(mesh.size())[mesh.get_local_rank()].tensor_split(cut.num_pieces)[cut.index]
    local = parameter.to_local()
    if mine.shape == local.shape:
        local.copy_(mine)


def _norm_alone(self: nn.LayerNorm, rows: DTensor) -> torch.Tensor:
    """Normalise this rank's rows with weights whose gradients are taken for whole."""
    whole = [Replicate()]
    weight, bias = (
        p.to_local(grad_placements=whole) for p in (self.weight, self.bias) if isinstance(p, DTensor)
    )
    local = functional.layer_norm(rows.to_local(), self.normalized_shape, weight, bias, self.eps)
    return in_place_of(rows, local)


def _nothing() -> None:
    """Leave the memory as it is."""


def _keeping_memory(
    parameter: FSDPParam,
) -> Callable[[torch.Tensor, Callable[[torch.Tensor], None]], None]:
    honest = parameter._init_from

    def init(whole: torch.Tensor, on_gradient: Callable[[torch.Tensor], None]) -> None:
        before: torch.Tensor | None = parameter.unsharded_param
        computed = local_tensor(before) if isinstance(before, DTensor) else None
        memory = None if computed is None else computed.data
        honest(whole, on_gradient)
        if computed is not None and memory is not None and before is parameter.unsharded_param:
            computed.data = memory
            parameter.return_to_gathered = _nothing  # type: ignore[method-assign]  # of this one

    return init


@contextmanager
def _forgetting(self: DistributedDataParallel) -> Iterator[None]:
    with DistributedDataParallel.no_sync(self):
        yield
    for parameter in self.parameters():
        parameter.grad = None


# Any: torch's buckets have no public type that checkers accept.
