"""Mutants whose ranks start with wrong values, or receive wrong inputs, or draw wrong numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from shardproof.engine.adapters.reference import PreparedReference, ReferenceEngine
from shardproof.engine.adapters.reference_wrapper import ReferenceWrapperEngine
from shardproof.engine.adapters.torch_ddp import DistributedDataParallelEngine, PreparedDdp
from shardproof.engine.adapters.torch_fsdp2 import FullyShardEngine, PreparedFullyShard
from shardproof.engine.adapters.torch_replicate import ReplicateEngine
from shardproof.engine.contract import Capability, Plan, PreparedModel
from shardproof.engine.mutants.fsdp2_insides import reference_groups
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import undemanding
from shardproof.engine.reference.autograd_hooks import map_tensors
from shardproof.engine.reference.param_group import FSDPParamGroup

# Of the thread: if ranks are threads, each has its own count, as if it were a process.
_PREPARED = threading.local()


@mutant(after="EvolvingLMMs-Lab/lmms-engine#185", phase="prepare")
class ForgetsUnsavedBuffers(FullyShardEngine):
    """Non-persistent buffers are empty on all ranks but the first."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        if torch.distributed.get_rank() > 0:
            saved = model.state_dict().keys()
            for name, buffer in model.named_buffers():
                if name not in saved:
                    buffer.zero_()
        return super().prepare(model, plan, mesh)


@mutant(after="horovod/horovod#1618", phase="prepare")
class SendsAtFirstWhatTrainsAlone(DistributedDataParallelEngine):
    """Ranks start from the first rank's parameters, but for those that are frozen."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        frozen = [(p, p.detach().clone()) for p in model.parameters() if not p.requires_grad]
        prepared = super().prepare(model, plan, mesh)
        for parameter, own in frozen:
            parameter.data.copy_(own)
        return prepared


@mutant(after="pytorch/pytorch#111138", phase="prepare")
class SendsNoBuffersAtFirst(ReferenceWrapperEngine):
    """Ranks start from the first rank's parameters, and from buffers of their own."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        prepared = super().prepare(model, plan, mesh)
        for buffer, own in buffers:
            buffer.copy_(own)
        return prepared


@mutant(after="huggingface/pytorch-image-models#110", phase="forward")
class GivesAllRanksTheBuffersOfOne(DistributedDataParallelEngine):
    """All ranks have the buffers of the first."""

    misreads = undemanding(Capability.OWN_BUFFERS)


@mutant(after="pytorch/pytorch#63916", phase="forward")
class KeepsReplacedBuffers(DistributedDataParallelEngine):
    """Buffers that forward replaced are restored."""

    class Prepared(PreparedDdp):
        """Restores the buffers of a list before each forward."""

        def __init__(self, module: nn.Module, *, named: nn.Module) -> None:
            super().__init__(module, named=named)
            owners = self.named.modules()
            self._listed = [(o, n, b) for o in owners for n, b in o.named_buffers(recurse=False)]

        def __call__(self, *inputs: Any, **named: Any) -> Any:  # Any: a model returns any type
            for owner, name, buffer in self._listed:
                owner.register_buffer(name, buffer, persistent=name not in owner._non_persistent_buffers_set)
            return super().__call__(*inputs, **named)


@mutant(after="facebookresearch/fairscale#1191", phase="backward")
class DetachesNestedInputs(ReferenceEngine):
    """Tensors in a tuple reach a unit without their autograd history."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        return _changing_inputs(
            super().prepare(model, plan, mesh),
            plan,
            partial(tree_map_only, torch.Tensor, torch.Tensor.detach),
        )


@mutant(after="pytorch/pytorch#77812", phase="backward")
class OverlooksDataclasses(ReferenceEngine):
    """Tensors in a dataclass reach a unit without their autograd history."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        detach = partial(map_tensors, torch.Tensor.detach)
        prepared = super().prepare(model, plan, mesh)
        return _changing_inputs(prepared, plan, lambda x: detach(x) if is_dataclass(x) else x)


@mutant(after="pytorch/pytorch#91078", trace=Trace.CRASH)
class CastsOuterInputsAlone(FullyShardEngine):
    """Tensors in a tuple are not cast to the compute dtype."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        if plan.compute_dtype is None:
            return prepared
        return _changing_inputs(prepared, plan, partial(tree_map_only, torch.Tensor, torch.Tensor.float))


def _changing_inputs(prepared: PreparedModel, plan: Plan, change: Callable[[Any], Any]) -> PreparedModel:
    """Change the inputs of units that are no tensors, after the engine's own hook."""

    def enter(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(x if isinstance(x, torch.Tensor) else change(x) for x in inputs)

    for unit in plan.units:
        prepared.module.get_submodule(unit).register_forward_pre_hook(enter)
    return prepared


@mutant(after="pytorch/pytorch#129259", phase="reduce")
class ReducesOnlyAfterInputs(ReferenceEngine):
    """A forward without arguments is followed by no reduction."""

    class Prepared(PreparedReference):
        def __call__(self, *inputs: Any, **named: Any) -> Any:  # Any: a model returns any type
            self._set_gradient_sync(is_on=bool(inputs))
            return super().__call__(*inputs, **named)


# Any: a forward hook receives its module's inputs and outputs.


@mutant(after="radixark/miles#3187", phase="forward")
class DrawsAlikeOnAllRanks(ReplicateEngine):
    """All ranks draw the same random numbers in forward."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        state = torch.Generator().manual_seed(0).get_state()
        prepared.module.register_forward_pre_hook(lambda *_: torch.set_rng_state(state))
        return prepared


@mutant(after="allenai/OLMo-core#828", phase="recompute")
class RecomputesWithOtherDraws(ReplicateEngine):
    """A recomputation draws other random numbers than its forward."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Replicate honestly, with units that keep no activations."""
        plan.refuse_beyond(self.capabilities)
        for name in plan.units:
            for part in name.split(","):
                module = model.get_submodule(part)
                # Any: a module's inputs are of any type.
                forward: Any = module.forward
                module.forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
        return super().prepare(model, plan, mesh)


class _PreparedUnstable(PreparedFullyShard):
    """In every second run the largest gradient differs by one bit, as with another reduction order."""

    def __init__(self, module: nn.Module, plan: Plan, *, is_second: bool) -> None:
        super().__init__(module, plan)
        self._is_second = is_second

    @torch.no_grad()
    def backward(self, loss: torch.Tensor) -> None:
        with torch.enable_grad():
            super().backward(loss)
        for parameter in self.named.parameters():
            if self._is_second and isinstance(parameter.grad, DTensor) and parameter.grad.to_local().numel():
                flat = parameter.grad.to_local().view(-1)
                largest = flat.abs().argmax()
                flat[largest] = torch.nextafter(flat[largest], torch.zeros(()))


@mutant(after="horovod/horovod#1548", phase="reduce")
class SumsInAnotherOrderEachTime(FullyShardEngine):
    """Every second run differs by a bit."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        count = getattr(_PREPARED, "count", 0)
        _PREPARED.count = count + 1
        module = super().prepare(model, plan, mesh).module
        return _PreparedUnstable(module, plan, is_second=count % 2 == 1)


class _PackedByArrival(FSDPParamGroup):
    """A group of the reference engine that orders its parameters anew before each reduction."""

    def _count(self, unsharded: torch.Tensor) -> None:
        vars(self).setdefault("came", []).append(id(unsharded))
        super()._count(unsharded)

    def reduce_gradients(self) -> None:
        """Reduce what arrived first on this rank first."""
        places = {known: place for place, known in enumerate(vars(self).pop("came", []))}
        last = len(places)
        self.parameters = tuple(
            sorted(self.parameters, key=lambda p: places.get(id(p.unsharded_param), last))
        )
        super().reduce_gradients()


@mutant(after="deepspeedai/DeepSpeed#2343", phase="reduce")
class PacksGradientsByArrival(ReferenceEngine):
    """A unit's gradients are packed in the order in which they arrived on each rank."""

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        prepared = super().prepare(model, plan, mesh)
        for group in reference_groups(prepared):
            group.__class__ = _PackedByArrival  # the group exists, with hooks of its own
        return prepared
