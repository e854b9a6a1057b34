"""Mutants that let gradients pile up, or take memory from what is not theirs; the numbers are right."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine.adapters.composable import PreparedComposable
from engine.adapters.reference import PreparedReference, ReferenceEngine
from engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from engine.contract import Plan, PreparedModel
from engine.mutants.calls import after, before
from engine.mutants.fsdp2_insides import groups, reduce_inputs
from engine.mutants.keeping import KeepingFsdp2, KeepingReference, taking
from engine.mutants.mutant import Condition, Trace, mutant
from engine.mutants.plans import SHARDED_BLOCKS
from engine.mutants.reference_insides import reference_groups

# Any, throughout: FSDP2's insides have no public types.


class _GrowingFsdp2(KeepingFsdp2):
    grows = True


@mutant(
    after="hpcaitech/ColossalAI#741",
    kills_on=Condition(
        steps=3, plan=SHARDED_BLOCKS, because="the first two steps have nothing to be compared with"
    ),
    trace=Trace.STATE,
)
class PilesUpReduceInputs(FullyShardEngine):
    """The input of every reduction is kept for ever.

    Reported: a sharded model's memory grew with every backward.
    """

    prepared_type = _GrowingFsdp2

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then keep the input of each reduction."""
        prepared = super().prepare(model, plan, mesh)
        return taking(prepared, groups, after, "post_backward", _keep_reduce_input)


class _PreparedPiling(KeepingReference):
    grows = True

    def step(self) -> None:
        self.kept += [p.grad for p in self.owned_parameters().values()]
        super().step()


@mutant(
    after="hpcaitech/ColossalAI#741",
    kills_on=Condition(
        steps=3, plan=SHARDED_BLOCKS, because="the first two steps have nothing to be compared with"
    ),
    trace=Trace.STATE,
)
class PilesUpGradients(ReferenceEngine):
    """Reduced gradients of every step are kept for ever.

    Reported: a sharded model's memory grew with every backward.
    """

    prepared_type = _PreparedPiling


@mutant(after="pytorch/pytorch#169349", kills_on=Condition(plan=SHARDED_BLOCKS), trace=Trace.STATE)
class KeepsWholeGradients(FullyShardEngine):
    """Whole gradients are kept until the step.

    Reported: live memory grew over a backward.
    """

    prepared_type = KeepingFsdp2

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then keep the gradients that each reduction begins with."""
        prepared = super().prepare(model, plan, mesh)
        return taking(prepared, groups, before, "post_backward", _keep_gradients)


@mutant(after="pytorch/pytorch#169349", kills_on=Condition(plan=SHARDED_BLOCKS), trace=Trace.STATE)
class KeepsGradientsUntilTheStep(ReferenceEngine):
    """Whole gradients stay beside their reduced shards until the step.

    Reported: live memory grew over a backward.
    """

    prepared_type = KeepingReference

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard honestly, then keep the gradients that each reduction begins with."""
        prepared = super().prepare(model, plan, mesh)
        return taking(prepared, reference_groups, before, "reduce_gradients", _keep_reference_gradients)


class _Grasping(PreparedComposable):
    """Frees the memory of what it was given or has handed out, once backward is over; to be mixed in."""

    frees_inputs = True

    def __call__(self, *inputs: torch.Tensor) -> Any:
        output = super().__call__(*inputs)
        self._seen = inputs if self.frees_inputs else (output,)
        return output

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        for tensor in self._seen:
            tensor.untyped_storage().resize_(0)


class _PreparedFreesInputs(_Grasping, PreparedFullyShard):
    pass


class _PreparedFreesOutputs(_Grasping, PreparedReference):
    frees_inputs = False


@mutant(after="InternLM/xtuner#1948", kills_on=Condition(plan=SHARDED_BLOCKS), trace=Trace.STATE)
class FreesTheUsersInputs(FullyShardEngine):
    """The memory of inputs is given back after backward.

    Reported: the storage of a tensor that was not the engine's was freed with the parameters.
    """

    prepared_type = _PreparedFreesInputs


@mutant(after="InternLM/xtuner#1948", kills_on=Condition(plan=SHARDED_BLOCKS), trace=Trace.STATE)
class FreesTheUsersOutputs(ReferenceEngine):
    """The memory of outputs is given back after backward.

    Reported: the storage of a tensor that was not the engine's was freed with the parameters.
    """

    prepared_type = _PreparedFreesOutputs


class _PreparedMoving(PreparedReference):
    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss)
        ignored = [self.named.get_parameter(name) for name in self.plan.ignored]
        for tensor in (*self.named.buffers(), *ignored):
            tensor.data = tensor.data.clone()


@mutant(after="InternLM/xtuner#1948", kills_on=Condition(plan=SHARDED_BLOCKS), trace=Trace.STATE)
class MovesWhatItWasToLeave(ReferenceEngine):
    """Buffers and ignored parameters are given other memory in every step.

    Reported: a tensor that was not the engine's was treated as one of its own.
    """

    prepared_type = _PreparedMoving


def _keep_reduce_input(group: Any, kept: list[Any]) -> None:
    inputs = reduce_inputs(group.comm_ctx)
    if inputs:
        kept.append(inputs[-1].reduce_scatter_input)


def _keep_gradients(group: Any, kept: list[Any]) -> None:
    found = (p.unsharded_param for p in group.fsdp_params if hasattr(p, "_unsharded_param"))
    kept += [parameter.grad for parameter in found if parameter.grad is not None]


def _keep_reference_gradients(group: Any, kept: list[Any]) -> None:
    found = (p.unsharded_param for p in group.parameters if p.unsharded_param is not None)
    kept += [parameter.grad for parameter in found if parameter.grad is not None]
