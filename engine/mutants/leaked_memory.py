"""Mutants that hold more than their share, or free memory that is not theirs; the numbers are right."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardproof.engine.adapters.composable import PreparedComposable
from shardproof.engine.adapters.reference import PreparedReference, ReferenceEngine
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine
from shardproof.engine.adapters.torch_replicate import ReplicateEngine
from shardproof.engine.contract import Plan, PreparedModel
from shardproof.engine.mutants.fsdp2_insides import before_method, keeping, layouts
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import (
    KeepingFsdp2,
    KeepingReference,
    in_each,
    in_place_of,
    is_last_rank,
    local,
)
from shardproof.engine.reference.param_layout import ParamLayout
from shardproof.engine.reference.parameter import FSDPParam, ShardedParam

# Any, throughout: FSDP2's private classes have no public types.


def _keep_gradients(kept: list[Any], group: Any) -> None:
    found = (p.unsharded_param for p in group.fsdp_params if hasattr(p, "_unsharded_param"))
    kept += [parameter.grad for parameter in found if parameter.grad is not None]


@mutant(after="hpcaitech/ColossalAI#741", trace=Trace.STATE)
class PilesUpGradients(ReferenceEngine):
    """Reduced gradients of every step are kept permanently."""

    class Prepared(KeepingReference):
        grows = True

        def step(self) -> None:
            self.kept += [p.grad for p in self.owned_parameters().values()]
            super().step()


@mutant(after="EleutherAI/DeeperSpeed#66", trace=Trace.STATE)
class KeepsWhatASkippedStepReduced(ReferenceEngine):
    """Gradients of a step that is skipped for an overflow are kept permanently."""

    class Prepared(KeepingReference):
        grows = True

        def zero_grad(self, *, set_to_none: bool) -> None:
            gradients = [p.grad for p in self.owned_parameters().values() if p.grad is not None]
            if not all(local(gradient).isfinite().all() for gradient in gradients):
                self.kept += [gradient.detach().clone() for gradient in gradients]
            super().zero_grad(set_to_none=set_to_none)


@mutant(after="verl-project/verl#7166", trace=Trace.STATE)
class KeepsOutputsUntilTheStep(ReferenceEngine):
    """The outputs of a model that has several are kept until the step, with what their backward would need."""

    class Prepared(KeepingReference):
        def __call__(self, *inputs: Any, **named: Any) -> Any:
            output = super().__call__(*inputs, **named)
            self.kept += [] if isinstance(output, torch.Tensor) else [output]
            return output


@mutant(after="pytorch/pytorch#169349", trace=Trace.STATE)
class KeepsWholeGradients(FullyShardEngine):
    """Whole gradients are kept until the step."""

    prepared_type = KeepingFsdp2
    spoil = keeping(before_method, "post_backward", _keep_gradients)


@mutant(after="pytorch/pytorch#45968", trace=Trace.STATE)
class KeepsWhatItReduced(ReplicateEngine):
    """Copies of gradients in the dtype of their reduction stay until the next step."""

    class Prepared(KeepingFsdp2):
        def step(self) -> None:
            super().step()
            gradients = [local(p.grad) for p in self.named.parameters() if p.grad is not None]
            dtype = self.plan.reduce_dtype
            self.kept += [g.to(dtype) for g in gradients if dtype is not None and g.dtype != dtype]


@mutant(after="NVIDIA/Megatron-LM#4940", trace=Trace.STATE)
class KeepsWhatALateGradientCameWith(ReferenceEngine):
    """A gradient that only the last microbatch makes keeps the memory of all gradients reduced with it."""

    spoil = in_each(layouts, "write_gradients", lambda layout: partial(_write_views, layout))


def _write_views(layout: ParamLayout, parameters: Sequence[FSDPParam], reduced: torch.Tensor) -> None:
    for parameter, part in layout.parts(parameters, reduced):
        assert isinstance(parameter, ShardedParam)
        parameter.accumulate_sharded_grad(parameter.geometry.own_part(part))


class _Grasping(PreparedComposable):
    """Frees the memory of its inputs or outputs once backward is over; a mixin."""

    frees_inputs = True

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        output = super().__call__(*inputs, **named)
        self._seen = inputs if self.frees_inputs else (output,)
        return output

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        for tensor in self._seen:
            tensor.untyped_storage().resize_(0)


@mutant(after="InternLM/xtuner#1948", trace=Trace.STATE)
class FreesTheUsersOutputs(ReferenceEngine):
    """The memory of outputs is freed after backward."""

    class Prepared(_Grasping, PreparedReference):
        frees_inputs = False


@mutant(after="InternLM/xtuner#1948", trace=Trace.STATE)
class MovesWhatItWasToLeave(ReferenceEngine):
    """Buffers and ignored parameters get new memory in every step."""

    class Prepared(PreparedReference):
        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss)
            ignored = [self.named.get_parameter(name) for name in self.plan.ignored]
            for tensor in (*self.named.buffers(), *ignored):
                tensor.data = tensor.data.clone()


@mutant(after="verl-project/verl#5125", trace=Trace.STATE)
class KeepsTheModelOnTheLastRank(ReferenceEngine):
    """The last rank keeps the original parameters of the model."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        wholes = [parameter.detach().clone() for parameter in model.parameters()]
        prepared = super().prepare(model, plan, mesh)
        if is_last_rank():
            prepared.module.register_forward_pre_hook(lambda *_: _look(wholes))
        return prepared


@mutant(after="pytorch/pytorch#105840", trace=Trace.STATE)
class KeepsTheModelInArrays(ReferenceEngine):
    """Every rank keeps the original parameters of the model, in memory outside of torch."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        wholes = [bytes(parameter.detach().cpu().numpy()) for parameter in model.parameters()]
        prepared = super().prepare(model, plan, mesh)
        prepared.module.register_forward_pre_hook(lambda *_: _look(wholes))
        return prepared


class _PreparedAverage(PreparedReference):
    """Reads every unit's whole parameters after its forward, and averages them in a list outside the module."""

    first_step: ClassVar[int] = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._averages: dict[tuple[nn.Module, str], torch.Tensor] = {}
        self._num_steps = 0
        for module in self.module.modules():
            # First of the hooks: afterwards there are shards again.
            module.register_forward_hook(self._look, prepend=True)

    def step(self) -> None:
        super().step()
        self._num_steps += 1

    @torch.no_grad()
    def _look(self, module: nn.Module, *_: Any) -> None:
        if self._num_steps < self.first_step:
            return
        for name, parameter in module.named_parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                average = self._averages.setdefault((module, name), parameter.detach().clone())
                average.lerp_(parameter, 0.1)


@mutant(after="TencentARC/RollingForcing#15", trace=Trace.STATE)
class AveragesWholeParameters(ReferenceEngine):
    """Every rank keeps an average of the whole parameters."""

    prepared_type = _PreparedAverage


@mutant(after="pytorch/pytorch#147179", trace=Trace.STATE)
class KeepsWholesAfterTheFirstStep(ReferenceEngine):
    """From the second step on every rank keeps whole parameters."""

    class Prepared(_PreparedAverage):
        first_step = 1


@mutant(after="hpcaitech/ColossalAI#1955", trace=Trace.STATE)
class CutsGradientsFromWholeBuffers(ReferenceEngine):
    """Shards of gradients are views of whole buffers."""

    class Prepared(PreparedReference):
        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss)
            for parameter in self.owned_parameters().values():
                if isinstance(parameter.grad, DTensor):
                    parameter.grad = _cut_from_a_whole(parameter.grad)


@mutant(after="cloneofsimo/min-fsdp#1", trace=Trace.STATE)
class CutsStateFromWholeBuffers(ReferenceEngine):
    """Shards of optimizer state are views of whole buffers."""

    class Prepared(PreparedReference):
        def step(self) -> None:
            super().step()
            for state in self.built_optimizer().state.values():
                for key, value in state.items():
                    if isinstance(value, DTensor):
                        state[key] = _cut_from_a_whole(value)


def _look(_: object) -> None:
    """Do nothing; the closure around the call keeps the argument alive."""


def _cut_from_a_whole(sharded: DTensor) -> DTensor:
    """Return the same shard, as a view of memory for the whole."""
    local = sharded.to_local()
    whole = local.new_zeros(sharded.numel())
    view = whole[: local.numel()].view(local.shape)
    view.copy_(local)
    return in_place_of(sharded, view)


@mutant(after="NVIDIA/Megatron-LM#6230", trace=Trace.STATE)
class KeepsModelsThatWereReplaced(ReferenceEngine):
    """Every model that was prepared stays in memory."""

    models: ClassVar[list[nn.Module]] = []

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        self.models.append(model)
        return super().prepare(model, plan, mesh)


@mutant(after="pytorch/pytorch#63211", trace=Trace.STATE)
class KeepsWhatItsHooksReferTo(DistributedDataParallelEngine):
    """A communication hook refers to the model, which nothing can free then: the cycle leads through C++."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        module = prepared.module
        assert isinstance(module, DistributedDataParallel)

        def reduce(_: object, bucket: Any) -> Any:
            return allreduce_hook(module.process_group, bucket)

        reduce.__annotations__.clear()  # DDP refuses those that it does not expect
        module.register_comm_hook(None, reduce)
        return prepared
