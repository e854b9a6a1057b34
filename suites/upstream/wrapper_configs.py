"""What the enums, config classes and wrap helpers beside ``FullyShardedDataParallel`` promise, one row each."""

from __future__ import annotations

from suites.upstream.row import UpstreamRow

__all__ = ["ROWS"]


def _of(file: str, name: str, promise: str) -> UpstreamRow:
    return UpstreamRow(id=name, file=file, test=name, promise=promise)


def _config(name: str, promise: str) -> UpstreamRow:
    return _of("api.py", name, promise)


def _helper(name: str, promise: str) -> UpstreamRow:
    return _of("wrap.py", name, promise)


ROWS = (
    _config(
        "ShardingStrategy.FULL_SHARD", "everything is sharded, and freed after forward and after backward"
    ),
    _config("ShardingStrategy.SHARD_GRAD_OP", "everything is sharded, and freed after backward alone"),
    _config("ShardingStrategy.NO_SHARD", "nothing is sharded, gradients are all-reduced"),
    _config("ShardingStrategy.HYBRID_SHARD", "FULL_SHARD in the shard group, all-reduced across replicas"),
    _config(
        "ShardingStrategy._HYBRID_SHARD_ZERO2",
        "SHARD_GRAD_OP in the shard group, all-reduced across replicas",
    ),
    _config(
        "BackwardPrefetch", "two moments for the next gather: before or after gradients; None for never early"
    ),
    _config("MixedPrecision", "defaults, and which inputs are cast and which gradients stay low"),
    _config("CPUOffload", "nothing is offloaded unless offload_params says so"),
    _config("StateDictType", "whole, local flat, or sharded by name"),
    _config("StateDictConfig", "offload_to_cpu, off by default"),
    _config("FullStateDictConfig", "rank0_only: the other ranks get nothing"),
    _config("LocalStateDictConfig", "belongs to LOCAL_STATE_DICT, and to no other type"),
    _config("ShardedStateDictConfig", "belongs to SHARDED_STATE_DICT, and to no other type"),
    _config("OptimStateDictConfig", "offload_to_cpu, on by default"),
    _config("FullOptimStateDictConfig", "rank0_only: the other ranks get no optimizer state"),
    _config(
        "LocalOptimStateDictConfig", "as LocalStateDictConfig, for optimizer state; offload_to_cpu is off"
    ),
    _config("ShardedOptimStateDictConfig", "belongs to SHARDED_STATE_DICT, for optimizer state"),
    _config("StateDictSettings", "type and both configs in one value"),
    _config("OptimStateKeyType", "optimizer state is keyed by parameter name or by parameter id"),
    _of("_flat_param.py", "FlatParameter", "the one parameter that a unit's parameters are joined in"),
    _helper("ModuleWrapPolicy", "a policy: every module of these classes"),
    _helper("CustomPolicy", "a policy: what a function says of each module, options of its own included"),
    _helper("always_wrap_policy", "a policy: every module"),
    _helper("lambda_auto_wrap_policy", "a policy: the leaves that a function of them chooses"),
    _helper("transformer_auto_wrap_policy", "a policy: every module of the layer classes named"),
    _helper("size_based_auto_wrap_policy", "a policy: modules with enough parameters that no unit has yet"),
    _helper("enable_wrap", "a context that supplies the wrapper and its options to wrap"),
    _helper("wrap", "wraps a module inside enable_wrap, and gives it back elsewhere"),
    _of(
        "sharded_grad_scaler.py",
        "ShardedGradScaler",
        "an infinite gradient on one rank makes all skip the step",
    ),
)
