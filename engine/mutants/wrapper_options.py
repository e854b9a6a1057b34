"""Mutants that forget or misread which units, ranks and strategy FullyShardedDataParallel is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardingStrategy,
    wrap,
)

from engine.adapters.torch_fsdp1 import NAMES, FullyShardedDataParallelEngine
from engine.contract import WrapperNames
from engine.mutants.wrapper_names import Options, leaving_out, swapping, with_options, with_strategies

__all__ = [
    "AcceptsContradictions",
    "AlwaysShowsFlatParameters",
    "AlwaysShowsNames",
    "ForgetsWhatToIgnore",
    "FreesWhatTheStrategyKeeps",
    "GivesUnitsNoOptions",
    "IgnoresOverridesOfAPolicy",
    "IgnoresTheGroupGiven",
    "IgnoresTheMeshGiven",
    "IgnoresThePolicy",
    "KeepsWhatTheStrategyFrees",
    "NeverMeetsReplicas",
    "ShardsWhatTheStrategyReplicates",
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


class _Stingy(wrap.ModuleWrapPolicy):
    # Any: options of units.
    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        lost = {"sharding_strategy": None, "use_orig_params": True}
        return super()._run_policy(root_module, ignored_modules, {**root_kwargs, **lost})


class GivesUnitsNoOptions(FullyShardedDataParallelEngine):
    """Units by class have the default strategy and show names, whatever the root was given.

    After speechbrain/speechbrain#2010: what was asked of the whole reached the first of its modules alone.
    """

    name = "mutant.GivesUnitsNoOptions"
    names: ClassVar[WrapperNames] = replace(NAMES, ModuleWrapPolicy=_Stingy)


# Any: what a policy's function says.
def _policy_of_answers(function: Any) -> wrap.CustomPolicy:
    return wrap.CustomPolicy(lambda module: bool(function(module)))


class IgnoresOverridesOfAPolicy(FullyShardedDataParallelEngine):
    """Of what a policy's function says of a module, only whether it is a unit counts.

    After NVIDIA/cosmos-framework#162: an option was honoured for some modules, and dropped for the others.
    """

    name = "mutant.IgnoresOverridesOfAPolicy"
    names: ClassVar[WrapperNames] = replace(NAMES, CustomPolicy=_policy_of_answers)


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
