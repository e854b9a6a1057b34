"""Mutants whose gradients are wrong by a factor or a part, or that unscale and skip steps wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardproof.engine.adapters.reference import PreparedReference, ReferenceEngine
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from shardproof.engine.contract import Plan, PreparedModel, Shard, Wire
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import changing


@mutant(after="NVIDIA/Megatron-LM#3023", phase="reduce")
class SumsInsteadOfAveraging(FullyShardEngine):
    """Gradients are summed over ranks, not averaged."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        for module in prepared.module.modules():
            if isinstance(module, FSDPModule):
                # Plain sums, because gloo lacks the scaled sum that a divisor otherwise uses.
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
        return prepared


@mutant(after="pytorch/pytorch#158753", phase="reduce")
class DropsImaginaryParts(DistributedDataParallelEngine):
    """Imaginary parts of gradients are zero."""

    class Prepared(PreparedDdp):
        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss)
            for parameter in self.named.parameters():
                if parameter.grad is not None and parameter.grad.is_complex():
                    parameter.grad.imag.zero_()


@mutant(after="pytorch/pytorch#117421", phase="reduce")
class AveragesWhatIsRead(DistributedDataParallelEngine):
    """Gradients that are not read before the optimizer step are summed over ranks, not averaged."""

    class Prepared(PreparedDdp):
        _is_read = False

        def local_gradients(self) -> Mapping[str, Shard | None]:
            self._is_read = True
            return super().local_gradients()

        def step(self) -> None:
            for parameter in [] if self._is_read else self.named.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(dist.get_world_size())
            self._is_read = False
            super().step()


@mutant(after="deepspeedai/DeepSpeed#5618", phase="reduce")
class AveragesWhateverTheFactor(ReferenceEngine):
    """In every layout gradients are averaged although another divisor was set."""

    misreads = changing(divide_factor=None)


@mutant(after="pytorch/pytorch#167178", phase="backward")
class DividesByTheSquareOfTheFactor(ReferenceEngine):
    """In every layout gradients are divided by the divisor twice."""

    class Prepared(PreparedReference):
        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss / (self.plan.divide_factor or 1))


@mutant(after="pytorch/pytorch#167178", phase="reduce")
class IgnoresTheDivideFactorOfOneRank(ReferenceEngine):
    """A rank that shares its shards with no other does not divide although a divisor was set."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Prepare honestly; alone, under a plan without the factor."""
        is_alone = mesh.size(mesh.ndim - 1) == 1
        return super().prepare(model, replace(plan, divide_factor=None) if is_alone else plan, mesh)


@mutant(after="pytorch/pytorch#160285", phase="reduce")
class HalvesOneUnit(ReferenceEngine):
    """The gradients of the first unit are half of what they should be."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Prepare honestly, and give one unit another factor."""
        prepared = super().prepare(model, plan, mesh)
        first = next(iter(plan.units), "").split(",")[0]
        unit: Any = model.get_submodule(first)
        unit.set_gradient_divide_factor(2.0 * plan.divisor(mesh.size()))
        return prepared


@mutant(after="pytorch/torchtitan#1551", trace=Trace.COMMUNICATION)
class AveragesOnTheWire(ReferenceEngine):
    """Averages cross between ranks although only sums were requested."""

    misreads = changing(wire=Wire.NATIVE)


class _OfOwnShards(GradScaler):
    # Any: optimizers have no narrower type for their parameters.
    def _unscale_grads_(
        self, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        gradients = [
            p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        own = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        torch._amp_foreach_non_finite_check_and_unscale_(own, found_inf, inv_scale)
        return {found_inf.device: found_inf}


@mutant(after="facebookresearch/fairscale#179", trace=Trace.STATE)
class SkipsOverflowsAlone(FullyShardEngine):
    """A rank whose own shards are finite takes a step that others skip."""

    class Prepared(PreparedFullyShard):
        def grad_scaler(self, *, init_scale: float, growth_interval: int) -> GradScaler:
            return _OfOwnShards("cpu", init_scale=init_scale, growth_interval=growth_interval)


class _OfFirst(GradScaler):
    def _unscale_grads_(
        self, optimizer: Any, *given: Any
    ) -> dict[torch.device, torch.Tensor]:  # Any: as above
        gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
        is_finite = bool(next(g for g in gradients if g is not None).isfinite().all())
        found = super()._unscale_grads_(optimizer, *given)
        return {device: torch.full_like(flag, float(not is_finite)) for device, flag in found.items()}


@mutant(after="facebookresearch/fairscale#890", trace=Trace.STATE)
class LooksForOverflowsInOneGradient(DistributedDataParallelEngine):
    """A step is skipped only if the first gradient has overflowed."""

    class Prepared(PreparedDdp):
        scaler_class = _OfFirst


class _Fused(GradScaler):
    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:  # Any: as torch's
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if parameter.grad is not None:
                    parameter.grad.div_(self.get_scale())
        return super().step(optimizer, *args, **kwargs)


@mutant(after="Lightning-AI/pytorch-lightning#15555", phase="step")
class UnscalesAgainInFusedSteps(DistributedDataParallelEngine):
    """A fused optimizer divides gradients by the scale that are already unscaled."""

    class Prepared(PreparedDdp):
        scaler_class = _Fused


class _Growing(GradScaler):
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        if self._get_growth_tracker() + 1 == self.get_growth_interval():
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if parameter.grad is not None:
                    parameter.grad.div_(self.get_growth_factor())


@mutant(after="deepspeedai/DeepSpeed#8588", phase="scale")
class UnscalesByTheNextScale(DistributedDataParallelEngine):
    """Gradients are divided by the scale after the step, not by that of the losses."""

    class Prepared(PreparedDdp):
        def grad_scaler(self, *, init_scale: float, growth_interval: int) -> GradScaler:
            return _Growing("cpu", init_scale=init_scale, growth_interval=growth_interval)


@mutant(after="NVIDIA/apex#1512", phase="clip")
class ClipsAsIfStillScaled(DistributedDataParallelEngine):
    """Gradients that are already unscaled are clipped as if they were not."""

    class Prepared(PreparedDdp):
        _scaler: GradScaler | None = None

        def grad_scaler(self, *, init_scale: float, growth_interval: int) -> GradScaler:
            self._scaler = super().grad_scaler(init_scale=init_scale, growth_interval=growth_interval)
            return self._scaler

        def clip_grad_norm_(self, max_norm: float, norm_type: float) -> float:
            scaler, scale = self._scaler, 1.0
            optimizer = id(self.built_optimizer())
            if scaler is not None and scaler._per_optimizer_states[optimizer]["stage"] is OptState.UNSCALED:
                scale = scaler.get_scale()
            return super().clip_grad_norm_(max_norm / scale, norm_type)


@mutant(after="pytorch/pytorch#132816", trace=Trace.STATE)
class CombinesOverflowsOverReplicas(FullyShardEngine):
    """Of a mesh with two axes, only the ranks of the first one agree whether a gradient has overflowed."""

    class Prepared(PreparedFullyShard):
        def grad_scaler(self, *, init_scale: float, growth_interval: int) -> GradScaler:
            first = next(iter(self.owned_parameters().values()))
            assert isinstance(first, DTensor)
            scaler = _OfOneAxis("cpu", init_scale=init_scale, growth_interval=growth_interval)
            scaler.group = first.device_mesh.get_group(0)
            return scaler


class _OfOneAxis(_OfOwnShards):
    group: dist.ProcessGroup

    def _unscale_grads_(self, *given: Any) -> dict[torch.device, torch.Tensor]:  # Any: as above
        found = super()._unscale_grads_(*given)
        for has_overflowed in found.values():
            dist.all_reduce(has_overflowed, op=dist.ReduceOp.MAX, group=self.group)
        return found
