"""Mutants whose fully_shard and replicate do not do what they are asked to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shardproof.engine.adapters.reference import PreparedReference, ReferenceEngine
from shardproof.engine.contract import Capability, FrontDoor
from shardproof.engine.mutants.mutant import Condition, Trace, mutant
from shardproof.engine.mutants.plans import demanding
from shardproof.engine.reference.fsdp_module import FSDPModule, managed_class
from shardproof.engine.reference.fsdp_state import state_of

_CALLS = Condition(plan=demanding(Capability.COMPOSABLE), because="training alone calls no such function")


class _Door(PreparedReference):
    """Has another fully_shard than the one that prepared it."""

    # Any: modules gain methods, and options are what a mutant overlooks.
    def fully_shard(self, module: Any, **options: Any) -> Any:
        """Shard as the reference engine does."""
        return super().composable().fully_shard(module, **options)

    def composable(self) -> FrontDoor:
        return replace(super().composable(), fully_shard=self.fully_shard)


def _groups(module: Any) -> Any:
    state = state_of(module if isinstance(module, nn.Module) else module[0])
    assert state is not None
    return state.param_groups


@mutant(after="Tencent-Hunyuan/UniRL#410", kills_on=_CALLS, trace=Trace.SILENCE)
class LeavesModulesAsTheyAre(ReferenceEngine):
    """fully_shard and replicate do nothing, whatever they are called with.

    Reported: the layout that was asked for was dropped on the way, and training went on.
    """

    class Prepared(PreparedReference):
        def composable(self) -> FrontDoor:
            same: Callable[..., Any] = lambda module, **_: module  # noqa: E731 - typed
            return replace(super().composable(), fully_shard=same, replicate=same, share_comm_ctx=same)


@mutant(after="huggingface/accelerate#3394", kills_on=_CALLS, trace=Trace.STATE)
class GoesOnWithWhatWasReplaced(ReferenceEngine):
    """A parameter that the caller replaces once it is sharded is not the one that is trained.

    Reported: an optimizer held parameters that preparation had replaced, and updated those.
    """

    class Prepared(_Door):
        def fully_shard(self, module: Any, **options: Any) -> Any:
            module = super().fully_shard(module, **options)
            for group in _groups(module):
                group.layout.reset_sharded_params = lambda: None
            return module


@mutant(after="pytorch/pytorch#83254", kills_on=_CALLS, trace=Trace.NUMBERS)
class NeverCallsTheReductionHook(ReferenceEngine):
    """A hook on what a unit has reduced is taken, and never called.

    Reported: of shards a communication hook was not called.
    """

    class Prepared(_Door):
        def fully_shard(self, module: Any, **options: Any) -> Any:
            module = super().fully_shard(module, **options)
            module.set_all_reduce_hook = lambda hook, **_: None
            return module


@mutant(after="pytorch/torchtitan#1483", kills_on=_CALLS, trace=Trace.STATE)
class TakesNegativeDimsForTheFirst(ReferenceEngine):
    """A dim that is counted from the end is taken for the first.

    Reported: what was cut along another dim was handled as if it were the first.
    """

    class Prepared(_Door):
        def fully_shard(self, module: Any, **options: Any) -> Any:
            chosen = options.get("shard_placement_fn")
            if chosen is not None:
                options["shard_placement_fn"] = lambda p: Shard(max(0, chosen(p).dim))
            return super().fully_shard(module, **options)


@mutant(after="huggingface/accelerate#3985", kills_on=_CALLS, trace=Trace.STATE)
class CastsWhatIsFrozen(ReferenceEngine):
    """All parameters of a unit are cast to one dtype, frozen ones of few bits too.

    Reported: a model was cast to one dtype before it was sharded, which quantised weights must not be.
    """

    class Prepared(_Door):
        def fully_shard(self, module: Any, **options: Any) -> Any:
            return super().fully_shard(module.float(), **options)


@mutant(after="pytorch/pytorch#83351", kills_on=_CALLS, trace=Trace.STATE)
class MarksWhatIsInside(ReferenceEngine):
    """Modules inside a sharded one, and parts of it, count as sharded themselves.

    Reported: what was reached through a wrapped module was not what the module had.
    """

    class Prepared(_Door):
        def fully_shard(self, module: Any, **options: Any) -> Any:
            module = super().fully_shard(module, **options)
            for inside in module.children():
                if not isinstance(inside, FSDPModule):
                    inside.__class__ = managed_class(type(inside), FSDPModule)
            return module


@mutant(after="facebookresearch/fairscale#440", kills_on=_CALLS, trace=Trace.STATE)
class PacksShardsIntoOne(ReferenceEngine):
    """The shards of a unit are views of one memory, so that freeing one frees all.

    Reported: memory that a state dict held was written over, because others used it too.
    """

    class Prepared(_Door):
        def fully_shard(self, module: Any, **options: Any) -> Any:
            module = super().fully_shard(module, **options)
            locals_ = [held.local for group in _groups(module) for held in group.parameters]
            packed = torch.cat([t.reshape(-1) for t in locals_])
            parts = torch.split(packed, [t.numel() for t in locals_])
            for tensor, part in zip(locals_, parts, strict=True):
                tensor.data = part.view(tensor.shape)
            return module


@mutant(after="NVIDIA-NeMo/RL#4183", kills_on=_CALLS, trace=Trace.STATE)
class SavesCopies(ReferenceEngine):
    """What state_dict returns is a copy of the shards.

    Reported: what was saved came through handles of other memory, so that every checkpoint held the same values.
    """

    class Prepared(_Door):
        def fully_shard(self, module: Any, **options: Any) -> Any:
            module = super().fully_shard(module, **options)
            module.register_state_dict_post_hook(_copy)
            return module


def _copy(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, value in state.items():
        state[name] = value.clone() if isinstance(value, DTensor) else value


@mutant(after="deepspeedai/DeepSpeed#5618", kills_on=_CALLS, trace=Trace.NUMBERS)
class ShardsOverAllRanksWhateverTheMesh(ReferenceEngine):
    """fully_shard shards over all ranks whatever mesh it is given.

    Reported: another group than the one that was asked for took part in reductions.
    """

    class Prepared(_Door):
        def fully_shard(self, module: Any, **options: Any) -> Any:
            return super().fully_shard(module, **{**options, "mesh": None})
