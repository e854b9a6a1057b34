"""Mutants whose fully_shard and replicate do not do what their callers request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardproof.engine.adapters.reference import PreparedReference, ReferenceEngine
from shardproof.engine.contract import ComposableApi
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.reference.fsdp_module import FSDPModule, managed_class
from shardproof.engine.reference.fsdp_state import state_of


class OwnFullyShard(PreparedReference):
    """Returns another fully_shard than the one that prepared it."""

    # Any: modules gain methods, and mutants ignore options.
    def fully_shard(self, module: Any, **options: Any) -> Any:
        module = super().composable().fully_shard(module, **options)
        self.spoil_module(module)
        return module

    def composable(self) -> ComposableApi:
        return replace(super().composable(), fully_shard=self.fully_shard)

    def spoil_module(self, module: Any) -> None:
        """Change a module that was sharded."""


class OwnFullyShardAndReplicate(OwnFullyShard):
    """Returns another replicate too."""

    def replicate(self, module: Any, **options: Any) -> Any:
        module = super().composable().replicate(module, **options)
        self.spoil_module(module)
        return module

    def composable(self) -> ComposableApi:
        return replace(super().composable(), replicate=self.replicate)


def groups_of(module: Any) -> Any:
    """Return the communication groups of a module that was sharded."""
    state = state_of(module if isinstance(module, nn.Module) else module[0])
    assert state is not None
    return state.param_groups


@mutant(after="Tencent-Hunyuan/UniRL#410", trace=Trace.SILENCE)
class LeavesModulesAsTheyAre(ReferenceEngine):
    """fully_shard and replicate do nothing, whatever their arguments are."""

    class Prepared(PreparedReference):
        def composable(self) -> ComposableApi:
            same: Callable[..., Any] = lambda module, **_: module  # noqa: E731 - typed
            return replace(super().composable(), fully_shard=same, replicate=same, share_comm_ctx=same)


@mutant(after="huggingface/accelerate#3394", trace=Trace.STATE)
class GoesOnWithWhatWasReplaced(ReferenceEngine):
    """A parameter that the caller replaces after sharding is not the one that is trained."""

    class Prepared(OwnFullyShard):
        def spoil_module(self, module: Any) -> None:
            for group in groups_of(module):
                group.layout.reset_sharded_params = lambda: None


@mutant(after="pytorch/pytorch#83254", trace=Trace.NUMBERS, phase="reduce")
class NeverCallsTheReductionHook(ReferenceEngine):
    """A hook on a unit's reduced gradients is accepted, and never called."""

    class Prepared(OwnFullyShard):
        def spoil_module(self, module: Any) -> None:
            module.set_all_reduce_hook = lambda hook, **_: None


@mutant(after="pytorch/torchtitan#1483", trace=Trace.STATE)
class TakesEveryDimForTheFirst(ReferenceEngine):
    """The caller's shard dim is ignored: the first is sharded."""

    class Prepared(OwnFullyShard):
        def fully_shard(self, module: Any, **options: Any) -> Any:
            return super().fully_shard(module, **{**options, "shard_placement_fn": None})


@mutant(after="huggingface/accelerate#3985", trace=Trace.STATE)
class CastsWhatIsFrozen(ReferenceEngine):
    """All parameters of a unit are cast to one dtype, frozen low-precision ones too."""

    class Prepared(OwnFullyShard):
        def fully_shard(self, module: Any, **options: Any) -> Any:
            return super().fully_shard(module.float(), **options)


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients


@mutant(after="pytorch/pytorch#182641", trace=Trace.CRASH)
class StopsTangents(ReferenceEngine):
    """Inputs pass through a function for backward alone."""

    class Prepared(OwnFullyShardAndReplicate):
        def spoil_module(self, module: Any) -> None:
            module.register_forward_pre_hook(lambda _, inputs: _Passed.apply(*inputs))  # type: ignore[no-untyped-call]


@mutant(after="pytorch/pytorch#83351", trace=Trace.STATE)
class MarksWhatIsInside(ReferenceEngine):
    """Modules inside a sharded one, and parts of it, count as sharded themselves."""

    class Prepared(OwnFullyShard):
        def spoil_module(self, module: Any) -> None:
            for inside in module.children():
                if not isinstance(inside, FSDPModule):
                    inside.__class__ = managed_class(type(inside), FSDPModule)


@mutant(after="facebookresearch/fairscale#440", trace=Trace.STATE)
class PacksShardsIntoOne(ReferenceEngine):
    """The shards of a unit are views of one memory, so that freeing one frees all."""

    class Prepared(OwnFullyShard):
        def spoil_module(self, module: Any) -> None:
            locals_ = [held.local for group in groups_of(module) for held in group.parameters]
            if not locals_:
                return
            packed = torch.cat([t.reshape(-1) for t in locals_])
            parts = torch.split(packed, [t.numel() for t in locals_])
            for tensor, part in zip(locals_, parts, strict=True):
                tensor.data = part.view(tensor.shape)


@mutant(after="NVIDIA-NeMo/RL#4183", trace=Trace.STATE)
class SavesTheFirstStateForEver(ReferenceEngine):
    """state_dict returns its first result on every call."""

    class Prepared(OwnFullyShard):
        def spoil_module(self, module: Any) -> None:
            saved: dict[str, Any] = {}

            def keep(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
                for name, value in state.items():
                    state[name] = (
                        saved.setdefault(name, value.clone()) if isinstance(value, DTensor) else value
                    )

            module.register_state_dict_post_hook(keep)


@mutant(after="verl-project/verl#6150", trace=Trace.STATE)
class IgnoresPolicies(ReferenceEngine):
    """fully_shard and replicate compute in the parameters' own dtype, whatever the policy is."""

    class Prepared(PreparedReference):
        def composable(self) -> ComposableApi:
            api = super().composable()
            return replace(api, mixed_precision=lambda **_: api.mixed_precision())


@mutant(after="NVIDIA/Megatron-LM#3023", trace=Trace.NUMBERS, phase="reduce")
class SumsWhatACallerPrepares(ReferenceEngine):
    """Gradients of modules that callers pass to fully_shard and replicate are summed over ranks, not averaged."""

    class Prepared(OwnFullyShardAndReplicate):
        def spoil_module(self, module: Any) -> None:
            module.set_gradient_divide_factor(1.0)


@mutant(after="pytorch/pytorch#190626", trace=Trace.NUMBERS, phase="reduce")
class AddsCopiesInTheComputeDtype(ReferenceEngine):
    """Parts of a gradient on another mesh axis are added before they are cast for the reduction."""

    class Prepared(OwnFullyShard):
        def spoil_module(self, module: Any) -> None:
            for group in groups_of(module):
                group._accumulation_dtype = lambda _: None


@mutant(after="pytorch/pytorch#158719", trace=Trace.STATE)
class LeavesOutWhatNoRankUsed(ReferenceEngine):
    """Parameters that no rank used have no gradient, also if they should have zeros."""

    class Prepared(OwnFullyShard):
        def spoil_module(self, module: Any) -> None:
            module.set_reduce_scatter_unused_params = lambda enable: None


@mutant(after="facebookresearch/fairscale#605", trace=Trace.NUMBERS, phase="hold")
class HidesWhatWaits(ReferenceEngine):
    """Gradients that wait for their reduction are where no caller can clear or change them."""

    class Prepared(OwnFullyShard):
        def spoil_module(self, module: Any) -> None:
            for group in groups_of(module):
                hidden: dict[Any, torch.Tensor] = {}
                group.hold_gradients = partial(_hide, group, hidden)
                group.reduce_gradients = partial(_reduce_with, group.reduce_gradients, hidden)


def _hide(group: Any, hidden: dict[Any, torch.Tensor]) -> None:
    for held in group.parameters:
        if held.has_unsharded_grad:
            fresh = held.pop_unsharded_grad(None)
            hidden[held] = hidden[held] + fresh if held in hidden else fresh


def _reduce_with(honest: Callable[[], None], hidden: dict[Any, torch.Tensor]) -> None:
    if not honest.__self__.reduces:  # type: ignore[attr-defined]  # a bound method
        return honest()
    for held, waited in hidden.items():
        if held.unsharded_param.grad is not None:
            waited = waited + held.unsharded_param.grad
        held.unsharded_param.grad = waited
    hidden.clear()
    return honest()


@mutant(after="pytorch/pytorch#134052", trace=Trace.NUMBERS, phase="hold")
class TakesTheBackwardOfInputsForAll(ReferenceEngine):
    """A microbatch counts as done once a backward has held its gradients: later weight gradients are lost."""

    class Prepared(OwnFullyShard):
        def spoil_module(self, module: Any) -> None:
            for group in groups_of(module):
                held: dict[Any, torch.Tensor | None] = {}
                group.hold_gradients = partial(_hold_once, group, held, group.hold_gradients)
                module.register_forward_pre_hook(partial(_forget, held))


def _hold_once(group: Any, held: dict[Any, torch.Tensor | None], honest: Callable[[], None]) -> None:
    for parameter, grad in held.items():
        parameter.unsharded_param.grad = grad
    honest()
    for parameter in group.parameters:
        grad = parameter.unsharded_param.grad
        held[parameter] = None if grad is None else grad.clone()


def _forget(held: dict[Any, torch.Tensor | None], *_: Any) -> None:
    held.clear()


@mutant(after="huggingface/accelerate#3898", trace=Trace.STATE)
class CopiesBuffers(ReferenceEngine):
    """A buffer that several modules share becomes a copy in each when they are sharded."""

    class Prepared(OwnFullyShard):
        def fully_shard(self, module: Any, **options: Any) -> Any:
            for inside in module.modules():
                for name, buffer in inside.named_buffers(recurse=False):
                    setattr(inside, name, buffer.clone())
            return super().fully_shard(module, **options)


@mutant(after="EvolvingLMMs-Lab/lmms-engine#185", trace=Trace.STATE)
class LeavesNewMemoryAtZeros(ReferenceEngine):
    """Models sharded without memory compute with zeros, whatever is written to them later."""

    class Prepared(OwnFullyShard):
        def fully_shard(self, module: Any, **options: Any) -> Any:
            if any(p.is_meta for p in module.parameters()):
                module.register_forward_pre_hook(_clear)
            return super().fully_shard(module, **options)


@torch.no_grad()
def _clear(module: nn.Module, _: Any) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.zero_()


@mutant(after="pytorch/pytorch#68803", trace=Trace.STATE)
class ManagesWhatItShouldIgnore(ReferenceEngine):
    """Ignored parameters are sharded, or replicated, like the others."""

    class Prepared(PreparedReference):
        def composable(self) -> ComposableApi:
            api = super().composable()
            return replace(
                api,
                fully_shard=_ignoring_nothing(api.fully_shard),
                replicate=_ignoring_nothing(api.replicate),
            )


def _ignoring_nothing(apply: Callable[..., Any]) -> Callable[..., Any]:
    return lambda module, **options: apply(module, **{**options, "ignored_params": None})


@mutant(after="pytorch/pytorch#157209", trace=Trace.STATE)
class DropsGradientsOfAFailedConversion(ReferenceEngine):
    """A failed conversion leaves parameters without their gradients."""

    class Prepared(OwnFullyShard):
        def spoil_module(self, module: Any) -> None:
            honest = module._apply

            def convert(*given: Any, **named: Any) -> Any:
                try:
                    return honest(*given, **named)
                except Exception:
                    module.zero_grad()
                    raise

            module._apply = convert


_REMEMBERED: list[Any] = []


@mutant(after="facebookresearch/fairscale#440", trace=Trace.STATE)
class RemembersWhatItSharded(ReferenceEngine):
    """Every sharded module is kept alive permanently."""

    class Prepared(OwnFullyShard):
        def fully_shard(self, module: Any, **options: Any) -> Any:
            _REMEMBERED.append(module)
            return super().fully_shard(module, **options)


@mutant(after="facebookresearch/fairscale#440", trace=Trace.STATE)
class KeepsOutputsInCycles(ReferenceEngine):
    """Each forward leaves its output in a reference cycle, which only the garbage collector frees."""

    class Prepared(OwnFullyShard):
        def spoil_module(self, module: Any) -> None:
            module.register_forward_hook(lambda *given: _in_a_cycle(given[-1]))


def _in_a_cycle(output: Any) -> None:
    cycle = [output]
    cycle.append(cycle)


@mutant(after="deepspeedai/DeepSpeed#5618", trace=Trace.NUMBERS, phase="prepare")
class ShardsOverAllRanksWhateverTheMesh(ReferenceEngine):
    """fully_shard shards over all ranks, whatever the mesh is."""

    class Prepared(OwnFullyShard):
        def fully_shard(self, module: Any, **options: Any) -> Any:
            return super().fully_shard(module, **{**options, "mesh": None})


@mutant(after="NVIDIA/cosmos-framework#161", trace=Trace.COMMUNICATION)
class FinalizesEachBackward(ReferenceEngine):
    """Each backward is finalized by itself, and reduces gradients that should be held back until finalization."""

    class Prepared(OwnFullyShardAndReplicate):
        def spoil_module(self, module: Any) -> None:
            if not isinstance(module, list):  # the root is none
                module.set_requires_gradient_sync = lambda *_, **__: None


@mutant(after="facebookresearch/fairscale#777", trace=Trace.NUMBERS, phase="reduce")
class FinalizesTwice(ReferenceEngine):
    """Gradients that finalization reduces count twice."""

    class Prepared(OwnFullyShardAndReplicate):
        def spoil_module(self, module: Any) -> None:
            if isinstance(module, list):  # no root
                return
            honest = module.finalize_backward

            def finalize(**options: Any) -> Any:
                for group in (
                    g for inside in module.modules() if state_of(inside) for g in groups_of(inside)
                ):
                    for held in group.parameters:
                        if group.reduces and held.has_unsharded_grad:
                            held.unsharded_param.grad = held.pop_unsharded_grad(None) * 2
                handle = honest(**options)
                if handle is None:
                    for parameter in module.parameters():
                        if parameter.grad is not None:
                            parameter.grad.mul_(2)
                return handle

            module.finalize_backward = finalize


@mutant(after="pytorch/pytorch#169349", trace=Trace.STATE)
class FreesWhatIsToBeKept(ReferenceEngine):
    """The memory of whole parameters is freed although it should be kept."""

    class Prepared(OwnFullyShard):
        def spoil_module(self, module: Any) -> None:
            module.set_keep_unsharded_storage = lambda *_, **__: None


@mutant(after="facebookresearch/fairscale#777", trace=Trace.NUMBERS, phase="gather")
class ShowsTheFirstValues(ReferenceEngine):
    """Whole parameters always have the values of the first gather."""

    class Prepared(OwnFullyShardAndReplicate):
        def spoil_module(self, module: Any) -> None:
            for held in (held for group in groups_of(module) for held in group.parameters):
                held.to_unsharded = partial(_show_first, held, held.to_unsharded, [])


def _show_first(held: Any, honest: Callable[[], None], first: list[torch.Tensor]) -> None:
    honest()
    first.append(held.unsharded_param.detach().clone())
    held.unsharded_param.data = first[0]


@mutant(after="pytorch/pytorch#104504", trace=Trace.SILENCE)
class SharesNoContext(ReferenceEngine):
    """Roots that should share a communication context use separate ones."""

    class Prepared(OwnFullyShard):
        def composable(self) -> ComposableApi:
            return replace(super().composable(), share_comm_ctx=lambda _: None)


@mutant(after="NVIDIA/cosmos-framework#161", trace=Trace.STATE)
class FreesWhenFinalized(ReferenceEngine):
    """Finalization frees units that should be kept, and keeps units that should be freed."""

    class Prepared(OwnFullyShardAndReplicate):
        def spoil_module(self, module: Any) -> None:
            honest = module.set_reshard_after_backward
            module.set_reshard_after_backward = lambda frees: honest(not frees)


@mutant(after="pytorch/pytorch#104504", trace=Trace.SILENCE)
class FinalizesWhateverComes(ReferenceEngine):
    """If a call of finalization should raise, it silently does nothing."""

    class Prepared(OwnFullyShardAndReplicate):
        def spoil_module(self, module: Any) -> None:
            module.finalize_backward = lambda **_: False
            module.set_manual_backward_finalization = lambda _: None
