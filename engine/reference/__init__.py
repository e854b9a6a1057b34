"""The reference sharding engine: two interfaces on one core, usable without the harness.

The interfaces are ``fully_shard`` and ``replicate`` (FSDP2) and, in `fsdp1`, ``FullyShardedDataParallel``. Read the
modules in import order: policies, mesh, torch_private and geometry (values and torch); autograd_hooks, parameter,
extensions and param_layout (tensors); comm_context and collectives (communication); param_group, root_state and
fsdp_state (scheduling); fsdp_module and fully_shard (the interface).
"""

from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from shardproof.engine.reference.comm_context import GradientReductionHandle
from shardproof.engine.reference.fsdp1.flat import FlatParameter
from shardproof.engine.reference.fsdp1.fully_sharded_data_parallel import FullyShardedDataParallel
from shardproof.engine.reference.fsdp1.wrap_policy import CustomPolicy, ModuleWrapPolicy, enable_wrap, wrap
from shardproof.engine.reference.fsdp_module import FSDPModule, ReplicateModule, UnshardHandle
from shardproof.engine.reference.fully_shard import (
    fully_shard,
    register_fsdp_forward_method,
    replicate,
    share_comm_ctx,
)
from shardproof.engine.reference.optim import GradScaler, ShardedGradScaler, clip_grad_norm_
from shardproof.engine.reference.policies import MixedPrecisionPolicy, ShardPlacementResult

__all__ = [
    "CPUOffloadPolicy",
    "CustomPolicy",
    "FSDPModule",
    "FlatParameter",
    "FullyShardedDataParallel",
    "GradScaler",
    "GradientReductionHandle",
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
