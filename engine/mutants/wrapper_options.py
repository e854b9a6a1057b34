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
from engine.mutants.mutant import Condition, Trace, mutant
from engine.mutants.plans import WRAPPED
from engine.mutants.wrapper_names import Options, leaving_out, swapping, with_options, with_strategies

_FULL, _ZERO2 = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
_HYBRID, _HYBRID_ZERO2 = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2


@mutant(
    after="Tencent-Hunyuan/UniRL#410",
    kills_on=Condition(plan=WRAPPED, because="a model of one unit needs no policy"),
    trace=Trace.STATE,
)
class IgnoresThePolicy(FullyShardedDataParallelEngine):
    """Whatever wrap policy is given, the root is the only unit.

    Reported: an option that was asked for took no effect, and nothing said so.
    """

    names: ClassVar[WrapperNames] = leaving_out("auto_wrap_policy")


def _with_layers(module: nn.Module, options: Options) -> Options:
    is_wrapped = bool(FullyShardedDataParallel.fsdp_modules(module))
    if is_wrapped or options.get("auto_wrap_policy") is not None:
        return options
    return {**options, "auto_wrap_policy": wrap.ModuleWrapPolicy({nn.Linear})}


@mutant(
    after="huggingface/accelerate#4171",
    kills_on=Condition(plan=WRAPPED, because="units that a policy names are those"),
    trace=Trace.STATE,
)
class WrapsLayersUnasked(FullyShardedDataParallelEngine):
    """Without a wrap policy every layer is a unit.

    Reported: modules were made units that nobody had named.
    """

    names: ClassVar[WrapperNames] = with_options(_with_layers)


class _Stingy(wrap.ModuleWrapPolicy):
    # Any: options of units.
    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        lost = {"sharding_strategy": None, "use_orig_params": True}
        return super()._run_policy(root_module, ignored_modules, {**root_kwargs, **lost})


@mutant(
    after="speechbrain/speechbrain#2010",
    kills_on=Condition(plan=WRAPPED, because="the root has its options"),
    trace=Trace.STATE,
)
class GivesUnitsNoOptions(FullyShardedDataParallelEngine):
    """Units that a policy names by class have another strategy and form than the root.

    Reported: what was asked of the whole reached the first of its modules alone.
    """

    names: ClassVar[WrapperNames] = replace(NAMES, ModuleWrapPolicy=_Stingy)


# Any: what a policy's function says.
def _policy_of_answers(function: Any) -> wrap.CustomPolicy:
    return wrap.CustomPolicy(lambda module: bool(function(module)))


@mutant(
    after="NVIDIA/cosmos-framework#162",
    kills_on=Condition(plan=WRAPPED, because="other options are those of the root"),
    trace=Trace.STATE,
)
class IgnoresOverridesOfAPolicy(FullyShardedDataParallelEngine):
    """Options that a policy gives to one unit have no effect.

    Reported: an option was honoured for some modules, and dropped for the others.
    """

    names: ClassVar[WrapperNames] = replace(NAMES, CustomPolicy=_policy_of_answers)


@mutant(
    after="huggingface/accelerate#3859",
    kills_on=Condition(plan=WRAPPED, because="names are what is asked for otherwise"),
    trace=Trace.STATE,
)
class AlwaysShowsNames(FullyShardedDataParallelEngine):
    """Parameters keep their names although flat ones were asked for.

    Reported: what the optimizer held had another form than the rest took it to have.
    """

    names: ClassVar[WrapperNames] = swapping("use_orig_params", {False: True})


@mutant(
    after="pytorch/pytorch#90546",
    kills_on=Condition(plan=WRAPPED, because="flat is what is asked for otherwise"),
    trace=Trace.STATE,
)
class AlwaysShowsFlatParameters(FullyShardedDataParallelEngine):
    """Parameters are flat although their names were asked for.

    Reported: with use_orig_params what was shown was not of the form that was asked for.
    """

    names: ClassVar[WrapperNames] = swapping("use_orig_params", {True: False})


@mutant(
    after="pytorch/pytorch#103682",
    kills_on=Condition(plan=WRAPPED, because="other strategies keep"),
    trace=Trace.STATE,
)
class KeepsWhatTheStrategyFrees(FullyShardedDataParallelEngine):
    """Units stay whole after forward although the strategy frees them.

    Reported: forward ran on parameters that were not in the state that the option promised.
    """

    names: ClassVar[WrapperNames] = with_strategies({_FULL: _ZERO2, _HYBRID: _HYBRID_ZERO2})


@mutant(
    after="pytorch/pytorch#105635",
    kills_on=Condition(plan=WRAPPED, because="other strategies free"),
    trace=Trace.STATE,
)
class FreesWhatTheStrategyKeeps(FullyShardedDataParallelEngine):
    """Units are freed after forward although the strategy keeps them.

    Reported: units were freed, and gathered once more than their strategy asks for.
    """

    names: ClassVar[WrapperNames] = with_strategies({_ZERO2: _FULL, _HYBRID_ZERO2: _HYBRID})


@mutant(
    after="Tencent-Hunyuan/UniRL#410",
    kills_on=Condition(plan=WRAPPED, because="other strategies shard"),
    trace=Trace.STATE,
)
class ShardsWhatTheStrategyReplicates(FullyShardedDataParallelEngine):
    """NO_SHARD shards.

    Reported: one layout was asked for, another one was trained in.
    """

    names: ClassVar[WrapperNames] = with_strategies({ShardingStrategy.NO_SHARD: _ZERO2})


def _in_the_default_group(option: str) -> WrapperNames:
    def change(module: nn.Module, options: Options) -> Options:
        is_hybrid = options.get("sharding_strategy") in {_HYBRID, _HYBRID_ZERO2}
        return options if is_hybrid else {k: v for k, v in options.items() if k != option}

    return with_options(change)


@mutant(
    after="pytorch/torchtitan#1551",
    kills_on=Condition(world_size=4, plan=WRAPPED, because="a group of all ranks is what is used"),
)
class IgnoresTheGroupGiven(FullyShardedDataParallelEngine):
    """The wrapper shards over all ranks whatever group is given.

    Reported: gradients were averaged over more ranks than those that share a parameter.
    """

    names: ClassVar[WrapperNames] = _in_the_default_group("process_group")


@mutant(
    after="deepspeedai/DeepSpeed#5618",
    kills_on=Condition(world_size=4, plan=WRAPPED, because="a mesh of all ranks is what is used"),
)
class IgnoresTheMeshGiven(FullyShardedDataParallelEngine):
    """The wrapper shards over all ranks whatever mesh is given.

    Reported: gradients were divided by the size of another group than their own.
    """

    names: ClassVar[WrapperNames] = _in_the_default_group("device_mesh")


def _one_replica(module: nn.Module, options: Options) -> Options:
    strategy = {_HYBRID: _FULL, _HYBRID_ZERO2: _ZERO2}.get(options.get("sharding_strategy", _FULL))
    if strategy is None:
        return options
    own = {**options, "sharding_strategy": strategy}
    if own.get("device_mesh") is not None:
        return {**own, "device_mesh": own["device_mesh"]["shard"]}
    return {**own, "process_group": own["process_group"][0]}


@mutant(
    after="verl-project/verl#7494",
    kills_on=Condition(world_size=4, plan=WRAPPED, because="other strategies have one group"),
)
class NeverMeetsReplicas(FullyShardedDataParallelEngine):
    """Hybrid strategies shard in one group and know of no other.

    Reported: hybrid sharding reduced over the shard group only.
    """

    names: ClassVar[WrapperNames] = with_options(_one_replica)


@mutant(
    after="pytorch/pytorch#68803",
    kills_on=Condition(plan=WRAPPED, because="nothing else is ignored"),
    trace=Trace.STATE,
)
class ForgetsWhatToIgnore(FullyShardedDataParallelEngine):
    """What is to be ignored is sharded.

    Reported: what was to be ignored was not left out on all ranks.
    """

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


@mutant(
    after="hpcaitech/ColossalAI#2496",
    kills_on=Condition(plan=WRAPPED, because="others are honoured"),
    trace=Trace.STATE,
)
class AcceptsContradictions(FullyShardedDataParallelEngine):
    """Arguments that contradict each other are accepted.

    Reported: a combination that was not supported was not refused either.
    """

    names: ClassVar[WrapperNames] = with_options(_resolved)
