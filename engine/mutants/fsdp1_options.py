"""Mutants that forget or misread the options with which FSDP1 wraps a module."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, wrap

from shardproof.engine.adapters.torch_fsdp1 import NAMES, FullyShardedDataParallelEngine
from shardproof.engine.contract import WrapperNames
from shardproof.engine.mutants.mutant import Trace, mutant
from shardproof.engine.mutants.patches import Options, leaving_out, swapping, with_options, with_strategies

_FULL, _ZERO2 = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
_LOW = torch.bfloat16
_HYBRID, _HYBRID_ZERO2 = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2


@mutant(after="Tencent-Hunyuan/UniRL#410", trace=Trace.STATE)
class IgnoresThePolicy(FullyShardedDataParallelEngine):
    """The root is the only unit, whatever the wrap policy is."""

    names = leaving_out("auto_wrap_policy")


def _with_layers(module: nn.Module, options: Options) -> Options:
    is_wrapped = bool(FullyShardedDataParallel.fsdp_modules(module))
    if is_wrapped or options.get("auto_wrap_policy") is not None:
        return options
    return {**options, "auto_wrap_policy": wrap.ModuleWrapPolicy({nn.Linear})}


@mutant(after="huggingface/accelerate#4171", trace=Trace.STATE)
class WrapsLayersUnasked(FullyShardedDataParallelEngine):
    """Without a wrap policy every layer is a unit."""

    names = with_options(_with_layers)


# Any: the result of a policy function.
def _policy_of_answers(function: Any) -> wrap.CustomPolicy:
    return wrap.CustomPolicy(lambda module: bool(function(module)))


@mutant(after="NVIDIA/cosmos-framework#162", trace=Trace.STATE)
class IgnoresOverridesOfAPolicy(FullyShardedDataParallelEngine):
    """Options that a policy sets for one unit have no effect."""

    names = replace(NAMES, CustomPolicy=_policy_of_answers)


@mutant(after="huggingface/accelerate#3859", trace=Trace.STATE)
class AlwaysShowsNames(FullyShardedDataParallelEngine):
    """Parameters keep their names although use_orig_params is off."""

    names = swapping("use_orig_params", {False: True})


@mutant(after="pytorch/pytorch#90546", trace=Trace.STATE)
class AlwaysShowsFlatParameters(FullyShardedDataParallelEngine):
    """Parameters are flat although use_orig_params is on."""

    names = swapping("use_orig_params", {True: False})


@mutant(after="pytorch/pytorch#103682", trace=Trace.STATE)
class KeepsWhatTheStrategyFrees(FullyShardedDataParallelEngine):
    """Units stay whole after forward although the strategy frees them."""

    names = with_strategies({_FULL: _ZERO2, _HYBRID: _HYBRID_ZERO2})


@mutant(after="pytorch/pytorch#105635", trace=Trace.STATE)
class FreesWhatTheStrategyKeeps(FullyShardedDataParallelEngine):
    """Units are freed after forward although the strategy keeps them."""

    names = with_strategies({_ZERO2: _FULL, _HYBRID_ZERO2: _HYBRID})


@mutant(after="Tencent-Hunyuan/UniRL#410", trace=Trace.STATE)
class ShardsWhatTheStrategyReplicates(FullyShardedDataParallelEngine):
    """NO_SHARD shards."""

    names = with_strategies({ShardingStrategy.NO_SHARD: _ZERO2})


def _in_the_default_group(option: str) -> WrapperNames:
    def change(module: nn.Module, options: Options) -> Options:
        is_hybrid = options.get("sharding_strategy") in {_HYBRID, _HYBRID_ZERO2}
        return options if is_hybrid else {k: v for k, v in options.items() if k != option}

    return with_options(change)


@mutant(after="pytorch/torchtitan#1551", phase="prepare")
class IgnoresTheGroupGiven(FullyShardedDataParallelEngine):
    """The wrapper shards over all ranks, whatever the group is."""

    names = _in_the_default_group("process_group")


@mutant(after="deepspeedai/DeepSpeed#5618", phase="prepare")
class IgnoresTheMeshGiven(FullyShardedDataParallelEngine):
    """The wrapper shards over all ranks, whatever the mesh is."""

    names = _in_the_default_group("device_mesh")


def _one_replica(module: nn.Module, options: Options) -> Options:
    strategy = {_HYBRID: _FULL, _HYBRID_ZERO2: _ZERO2}.get(options.get("sharding_strategy", _FULL))
    if strategy is None:
        return options
    own = {**options, "sharding_strategy": strategy}
    if own.get("device_mesh") is not None:
        return {**own, "device_mesh": own["device_mesh"]["shard"]}
    return {**own, "process_group": own["process_group"][0]}


@mutant(after="verl-project/verl#7494", phase="replicate")
class NeverMeetsReplicas(FullyShardedDataParallelEngine):
    """Hybrid strategies shard in one group and ignore the other."""

    names = with_options(_one_replica)


@mutant(after="pytorch/pytorch#68803", trace=Trace.STATE)
class ForgetsWhatToIgnore(FullyShardedDataParallelEngine):
    """Ignored states are sharded."""

    names = leaving_out("ignored_modules", "ignored_states")


def _resolved(module: nn.Module, options: Options) -> Options:
    """Let one of two options win, and leave out those without effect."""
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


@mutant(after="hpcaitech/ColossalAI#2496", trace=Trace.STATE)
class AcceptsContradictions(FullyShardedDataParallelEngine):
    """Arguments that contradict each other are accepted."""

    names = with_options(_resolved)


# Any: fields of MixedPrecision.
def _with_precision(**fields: Any) -> WrapperNames:
    """Return names that change these fields of every precision."""

    def change(module: nn.Module, options: Options) -> Options:
        asked = options.get("mixed_precision")
        return options if asked is None else {**options, "mixed_precision": replace(asked, **fields)}

    return with_options(change)


@mutant(after="verl-project/verl#6150", trace=Trace.STATE)
class IgnoresMixedPrecision(FullyShardedDataParallelEngine):
    """Everything is computed and reduced in full precision."""

    names = leaving_out("mixed_precision")


def _low_by_default(module: nn.Module, options: Options) -> Options:
    is_empty = options.get("mixed_precision") == MixedPrecision()
    return {**options, "mixed_precision": MixedPrecision(param_dtype=_LOW)} if is_empty else options


@mutant(after="pytorch/pytorch#143277", trace=Trace.STATE)
class ComputesInBfloat16Unasked(FullyShardedDataParallelEngine):
    """A precision without dtypes computes in bfloat16."""

    names = with_options(_low_by_default)


def _computing_as_reducing(module: nn.Module, options: Options) -> Options:
    asked = options.get("mixed_precision")
    if asked is None or asked.reduce_dtype is None:
        return options
    return {**options, "mixed_precision": replace(asked, param_dtype=asked.reduce_dtype)}


@mutant(after="pytorch/pytorch#153077", trace=Trace.STATE)
class ComputesInTheReduceDtype(FullyShardedDataParallelEngine):
    """Forward computes in the reduce dtype."""

    names = with_options(_computing_as_reducing)


@mutant(after="pytorch/pytorch#190626", phase="reduce")
class ReducesInTheComputeDtype(FullyShardedDataParallelEngine):
    """The reduce dtype has no effect."""

    names = _with_precision(reduce_dtype=None)


@mutant(after="pytorch/pytorch#160279", trace=Trace.STATE)
class IgnoresCastFlags(FullyShardedDataParallelEngine):
    """The flags that choose which inputs are cast have no effect."""

    names = _with_precision(cast_root_forward_inputs=True, cast_forward_inputs=False)


@mutant(after="huggingface/transformers#34645", trace=Trace.STATE)
class KeepsLowGradients(FullyShardedDataParallelEngine):
    """Gradients stay in low precision although keep_low_precision_grads is off."""

    names = _with_precision(keep_low_precision_grads=True)


@mutant(after="pytorch/pytorch#196996", trace=Trace.STATE)
class CastsBatchNorm(FullyShardedDataParallelEngine):
    """BatchNorm computes in low precision."""

    names = _with_precision(_module_classes_to_ignore=(), buffer_dtype=_LOW)


def _rounded(module: nn.Module, options: Options) -> Options:
    asked = options.get("mixed_precision")
    if asked is not None and _LOW in {asked.param_dtype, asked.reduce_dtype}:
        module.to(_LOW)
    return options


@mutant(after="pytorch/torchtitan#724", trace=Trace.STATE)
class RoundsTheShards(FullyShardedDataParallelEngine):
    """Shards are kept in low precision."""

    names = with_options(_rounded)


@mutant(after="pytorch/pytorch#105840", trace=Trace.STATE)
class IgnoresTheInitialiser(FullyShardedDataParallelEngine):
    """param_init_fn is never called."""

    names = leaving_out("param_init_fn")


def _empty(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    with torch.no_grad():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.zero_()


@mutant(after="EvolvingLMMs-Lab/lmms-engine#185", trace=Trace.STATE)
class NeverResets(FullyShardedDataParallelEngine):
    """Modules without memory are left at zeros."""

    names = with_options(lambda module, options: {"param_init_fn": _empty, **options})


@mutant(after="verl-project/verl#7834", trace=Trace.CRASH)
class LeavesBuffersWithoutMemory(FullyShardedDataParallelEngine):
    """Buffers without memory stay without."""

    class Wrapper(FullyShardedDataParallel):
        # Any: arguments of the wrapper.
        def __init__(self, module: nn.Module, **options: Any) -> None:
            lost = [m for m in module.modules() for b in m.buffers(recurse=False) if b.is_meta]
            super().__init__(module, **options)
            for owner in lost:
                for name, buffer in list(owner.named_buffers(recurse=False)):
                    setattr(owner, name, buffer.to("meta"))


@mutant(after="allenai/OLMo-core#319", trace=Trace.STATE)
class StartsEachRankOnItsOwn(FullyShardedDataParallelEngine):
    """sync_module_states has no effect."""

    names = leaving_out("sync_module_states")


@mutant(after="pytorch/pytorch#109385", trace=Trace.STATE)
class WrapsContainersSilently(FullyShardedDataParallelEngine):
    """A list of modules is wrapped without a warning."""

    class Wrapper(FullyShardedDataParallel):
        # Any: arguments of the wrapper.
        def __init__(self, module: nn.Module, **options: Any) -> None:
            if not isinstance(module, nn.ModuleList | nn.ModuleDict):
                super().__init__(module, **options)
                return
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                super().__init__(module, **options)
