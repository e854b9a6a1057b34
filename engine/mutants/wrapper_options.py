"""Mutants that forget, invert or misread one option of FullyShardedDataParallel."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy, wrap

from engine.adapters.torch_fsdp1 import NAMES, FullyShardedDataParallelEngine
from engine.contract import WrapperNames
from engine.mutants.wrapper_names import Options, leaving_out, swapping, with_options, with_strategies

__all__ = [
    "AcceptsContradictions",
    "AlwaysShowsFlatParameters",
    "AlwaysShowsNames",
    "ForgetsWhatToIgnore",
    "FreesWhatTheStrategyKeeps",
    "GathersAllUnitsAtOnce",
    "IgnoresTheGroupGiven",
    "IgnoresTheInitialiser",
    "IgnoresTheMeshGiven",
    "IgnoresThePolicy",
    "InvertsForwardPrefetch",
    "KeepsWhatTheStrategyFrees",
    "LeavesBuffersWithoutMemory",
    "NeverMeetsReplicas",
    "NeverResets",
    "ReadsOffloadedGradientsTooEarly",
    "ShardsWhatTheStrategyReplicates",
    "StartsEachRankOnItsOwn",
    "SwapsBackwardPrefetch",
    "WrapsContainersSilently",
    "WrapsLayersUnasked",
]

_FULL, _ZERO2 = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
_HYBRID, _HYBRID_ZERO2 = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2


class IgnoresThePolicy(FullyShardedDataParallelEngine):
    """Whatever policy is given, the root is the only unit.

    After Tencent-Hunyuan/UniRL#410: an option that was asked for took no effect, and nothing said so.
    """

    name = "mutant.IgnoresThePolicy"
    names: ClassVar[WrapperNames] = leaving_out("auto_wrap_policy")


def _with_layers(module: nn.Module, options: Options) -> Options:
    is_wrapped = bool(FullyShardedDataParallel.fsdp_modules(module))
    if is_wrapped or options.get("auto_wrap_policy") is not None:
        return options
    return {**options, "auto_wrap_policy": wrap.ModuleWrapPolicy({nn.Linear})}


class WrapsLayersUnasked(FullyShardedDataParallelEngine):
    """Where no policy is given, every linear layer is a unit.

    After huggingface/accelerate#4171: modules were made units that nobody had named.
    """

    name = "mutant.WrapsLayersUnasked"
    names: ClassVar[WrapperNames] = with_options(_with_layers)


class AlwaysShowsNames(FullyShardedDataParallelEngine):
    """Parameters keep their names, whether asked to or not.

    After huggingface/accelerate#3859: what the optimizer held had another form than the rest took it to have.
    """

    name = "mutant.AlwaysShowsNames"
    names: ClassVar[WrapperNames] = swapping("use_orig_params", {False: True})


class AlwaysShowsFlatParameters(FullyShardedDataParallelEngine):
    """Parameters are flat, whether asked to or not.

    After pytorch/pytorch#90546: with use_orig_params what was shown was not of the form that was asked for.
    """

    name = "mutant.AlwaysShowsFlatParameters"
    names: ClassVar[WrapperNames] = swapping("use_orig_params", {True: False})


class KeepsWhatTheStrategyFrees(FullyShardedDataParallelEngine):
    """Units stay whole after forward, although the strategy frees them; the numbers are right.

    After pytorch/pytorch#103682: forward ran on parameters that were not in the state that the option promised.
    """

    name = "mutant.KeepsWhatTheStrategyFrees"
    names: ClassVar[WrapperNames] = with_strategies({_FULL: _ZERO2, _HYBRID: _HYBRID_ZERO2})


class FreesWhatTheStrategyKeeps(FullyShardedDataParallelEngine):
    """Units are freed after forward, although the strategy keeps them; the numbers are right.

    After pytorch/pytorch#105635: units were freed, and gathered once more than their strategy asks for.
    """

    name = "mutant.FreesWhatTheStrategyKeeps"
    names: ClassVar[WrapperNames] = with_strategies({_ZERO2: _FULL, _HYBRID_ZERO2: _HYBRID})


class ShardsWhatTheStrategyReplicates(FullyShardedDataParallelEngine):
    """NO_SHARD shards all the same; the numbers are right.

    After Tencent-Hunyuan/UniRL#410: one layout was asked for, another one was trained in.
    """

    name = "mutant.ShardsWhatTheStrategyReplicates"
    names: ClassVar[WrapperNames] = with_strategies({ShardingStrategy.NO_SHARD: _ZERO2})


def _in_the_default_group(option: str) -> WrapperNames:
    def change(module: nn.Module, options: Options) -> Options:
        is_hybrid = options.get("sharding_strategy") in {_HYBRID, _HYBRID_ZERO2}
        return options if is_hybrid else {k: v for k, v in options.items() if k != option}

    return with_options(change)


class IgnoresTheGroupGiven(FullyShardedDataParallelEngine):
    """Shards over all ranks, whatever group is given.

    After pytorch/torchtitan#1551: gradients were averaged over more ranks than those that share a parameter.
    """

    name = "mutant.IgnoresTheGroupGiven"
    names: ClassVar[WrapperNames] = _in_the_default_group("process_group")


class IgnoresTheMeshGiven(FullyShardedDataParallelEngine):
    """Shards over all ranks, whatever mesh is given.

    After deepspeedai/DeepSpeed#5618: gradients were divided by the size of another group than their own.
    """

    name = "mutant.IgnoresTheMeshGiven"
    names: ClassVar[WrapperNames] = _in_the_default_group("device_mesh")


def _one_replica(module: nn.Module, options: Options) -> Options:
    strategy = {_HYBRID: _FULL, _HYBRID_ZERO2: _ZERO2}.get(options.get("sharding_strategy", _FULL))
    if strategy is None:
        return options
    own = {**options, "sharding_strategy": strategy}
    if own.get("device_mesh") is not None:
        return {**own, "device_mesh": own["device_mesh"]["shard"]}
    return {**own, "process_group": own["process_group"][0]}


class NeverMeetsReplicas(FullyShardedDataParallelEngine):
    """Hybrid strategies shard within the first group, or the second axis, and know of no other.

    After verl-project/verl#7494: hybrid sharding reduced over the shard group only.
    """

    name = "mutant.NeverMeetsReplicas"
    names: ClassVar[WrapperNames] = with_options(_one_replica)


class ForgetsWhatToIgnore(FullyShardedDataParallelEngine):
    """Ignored modules and parameters are sharded like all others.

    After pytorch/pytorch#68803: what was to be ignored was not left out on all ranks.
    """

    name = "mutant.ForgetsWhatToIgnore"
    names: ClassVar[WrapperNames] = leaving_out("ignored_modules", "ignored_states")


class _Early(FullyShardedDataParallel):
    # Any: arguments of the wrapper, and of the module.
    def __init__(self, module: nn.Module, cpu_offload: Any = None, **options: Any) -> None:
        super().__init__(module, **options)
        self._is_early = cpu_offload is not None and cpu_offload.offload_params

    def forward(self, *inputs: Any, **named: Any) -> Any:
        output = super().forward(*inputs, **named)
        if self._is_early:
            output.register_hook(torch.zeros_like)
        return output


class ReadsOffloadedGradientsTooEarly(FullyShardedDataParallelEngine):
    """With CPUOffload the optimizer reads gradients on the host before they are there: it finds zeros.

    After pytorch/pytorch#180665: the copy of gradients to the host was not waited for.
    """

    name = "mutant.ReadsOffloadedGradientsTooEarly"
    names: ClassVar[WrapperNames] = replace(NAMES, FullyShardedDataParallel=_Early)


class SwapsBackwardPrefetch(FullyShardedDataParallelEngine):
    """BACKWARD_PRE gathers after gradients, BACKWARD_POST when needed, None before; the numbers are right.

    After pytorch/pytorch#107058: nothing would have shown whether backward prefetches at all.
    """

    name = "mutant.SwapsBackwardPrefetch"
    names: ClassVar[WrapperNames] = swapping(
        "backward_prefetch",
        {
            BackwardPrefetch.BACKWARD_PRE: BackwardPrefetch.BACKWARD_POST,
            BackwardPrefetch.BACKWARD_POST: None,
            None: BackwardPrefetch.BACKWARD_PRE,
        },
    )


class InvertsForwardPrefetch(FullyShardedDataParallelEngine):
    """Forward prefetches unless it is asked to; the numbers are right.

    After pytorch/pytorch#106030: nothing would have shown whether forward prefetches at all.
    """

    name = "mutant.InvertsForwardPrefetch"
    names: ClassVar[WrapperNames] = swapping("forward_prefetch", {False: True, True: False})


class _Greedy(FullyShardedDataParallel):
    # Any: a module takes and returns what it likes.
    def forward(self, *inputs: Any, **named: Any) -> Any:
        works = [*self._gathers_of_units()]
        output = super().forward(*inputs, **named)
        for work in works:
            work.wait()
        return output

    def _gathers_of_units(self) -> Iterable[Any]:
        for unit in FullyShardedDataParallel.fsdp_modules(self):
            handle = unit._handle
            if handle is not None and handle.world_size > 1:
                shard = handle.flat_param.detach()
                whole = shard.new_empty(shard.numel() * handle.world_size)
                yield dist.all_gather_into_tensor(whole, shard, group=handle.process_group, async_op=True)


class GathersAllUnitsAtOnce(FullyShardedDataParallelEngine):
    """The root starts to gather every unit before the first one runs, limit or not; the numbers are right.

    After pytorch/pytorch#107058: nothing would have shown what is gathered when.
    """

    name = "mutant.GathersAllUnitsAtOnce"
    names: ClassVar[WrapperNames] = replace(NAMES, FullyShardedDataParallel=_Greedy)


class IgnoresTheInitialiser(FullyShardedDataParallelEngine):
    """Modules without memory reset themselves, although a function was given that initialises.

    After pytorch/pytorch#105840: with param_init_fn a model began with other values than those that it was given.
    """

    name = "mutant.IgnoresTheInitialiser"
    names: ClassVar[WrapperNames] = leaving_out("param_init_fn")


def _empty(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    with torch.no_grad():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.zero_()


class NeverResets(FullyShardedDataParallelEngine):
    """Modules without memory are given some, and nothing is put there.

    After EvolvingLMMs-Lab/lmms-engine#185: what was made without memory was never initialised.
    """

    name = "mutant.NeverResets"
    names: ClassVar[WrapperNames] = with_options(lambda module, options: {"param_init_fn": _empty, **options})


class _Lossy(FullyShardedDataParallel):
    # Any: arguments of the wrapper.
    def __init__(self, module: nn.Module, **options: Any) -> None:
        lost = [m for m in module.modules() for b in m.buffers(recurse=False) if b.is_meta]
        super().__init__(module, **options)
        for owner in lost:
            for name, buffer in list(owner.named_buffers(recurse=False)):
                setattr(owner, name, buffer.to("meta"))


class LeavesBuffersWithoutMemory(FullyShardedDataParallelEngine):
    """Of modules without memory, parameters are brought to the device, and buffers are left.

    After verl-project/verl#7834: what was made without memory was not what it should be once it had some.
    """

    name = "mutant.LeavesBuffersWithoutMemory"
    names: ClassVar[WrapperNames] = replace(NAMES, FullyShardedDataParallel=_Lossy)


class StartsEachRankOnItsOwn(FullyShardedDataParallelEngine):
    """sync_module_states has no effect: each rank starts with values of its own.

    After allenai/OLMo-core#319: ranks were initialised apart, and nothing was broadcast.
    """

    name = "mutant.StartsEachRankOnItsOwn"
    names: ClassVar[WrapperNames] = leaving_out("sync_module_states")


class _Silent(FullyShardedDataParallel):
    # Any: arguments of the wrapper.
    def __init__(self, module: nn.Module, **options: Any) -> None:
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):
            super().__init__(module, **options)
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            super().__init__(module, **options)


class WrapsContainersSilently(FullyShardedDataParallelEngine):
    """A bare list of modules, whose forward nobody calls, is wrapped without a warning.

    After pytorch/pytorch#109385: modules ran on shards, for what gathers them hangs on a forward that is not called.
    """

    name = "mutant.WrapsContainersSilently"
    names: ClassVar[WrapperNames] = replace(NAMES, FullyShardedDataParallel=_Silent)


def _resolved(module: nn.Module, options: Options) -> Options:
    """Let one of two options win, and leave out what has no meaning."""
    left = dict(options)
    if left.get("process_group") is not None and left.get("device_mesh") is not None:
        del left["device_mesh"]
    ignored = [m for m in left.pop("ignored_modules", None) or [] if isinstance(m, nn.Module)]
    states = list(left.pop("ignored_states", None) or ignored)
    scalars = [p for p in module.parameters() if not p.dim()]
    left["ignored_states"] = scalars or [s for s in states if isinstance(s, type(states[0]))]
    if left.get("sharding_strategy") in {_HYBRID, _HYBRID_ZERO2} and not _has_replicas(left):
        left["sharding_strategy"] = _FULL
    if not callable(left.get("param_init_fn")):
        left["param_init_fn"] = None
    if FullyShardedDataParallel.fsdp_modules(module):
        left["auto_wrap_policy"] = None
    is_mixed = len({p.requires_grad for p in module.parameters()}) > 1
    return {**left, "use_orig_params": left.get("use_orig_params", False) or is_mixed}


def _has_replicas(options: Options) -> bool:
    mesh, groups = options.get("device_mesh"), options.get("process_group")
    return isinstance(groups, tuple) or (mesh is not None and mesh.ndim > 1)


class AcceptsContradictions(FullyShardedDataParallelEngine):
    """Of options that contradict each other one wins, and what has no meaning is left out, without a word.

    After hpcaitech/ColossalAI#2496: a combination that was not supported was not refused either.
    """

    name = "mutant.AcceptsContradictions"
    names: ClassVar[WrapperNames] = with_options(_resolved)
