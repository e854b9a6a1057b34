"""The reference sharding engine, usable without the harness, behind two doors on one core.

The doors are ``fully_shard`` and ``replicate`` (composable) and ``FullyShardedDataParallel`` (wrapper). Read it in
the order of its imports: policies, mesh, geometry and nested (values); torch_internals; parameter, unsharded and the
two arrangements (memory); collectives, division, lanes and reduction (communication); checks and group; tree, unit
and stepping (when things happen); module and composable; then wrapper_options to wrapper.
"""

from engine.reference.composable import fully_shard, register_fsdp_forward_method, replicate, share_comm_ctx
from engine.reference.flat import FlatParameter
from engine.reference.module import FSDPModule, ReplicateModule, UnshardHandle
from engine.reference.norm import clip_grad_norm_
from engine.reference.policies import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
)
from engine.reference.scaler import ShardedGradScaler
from engine.reference.wrapper import FullyShardedDataParallel
from engine.reference.wrapping import CustomPolicy, ModuleWrapPolicy, enable_wrap, wrap

__all__ = [
    "CPUOffloadPolicy",
    "CustomPolicy",
    "FSDPModule",
    "FlatParameter",
    "FullyShardedDataParallel",
    "MixedPrecisionPolicy",
    "ModuleWrapPolicy",
    "OffloadPolicy",
    "ReplicateModule",
    "ShardPlacementResult",
    "ShardedGradScaler",
    "UnshardHandle",
    "clip_grad_norm_",
    "enable_wrap",
    "fully_shard",
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
    "wrap",
]
