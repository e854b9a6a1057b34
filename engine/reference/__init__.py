"""The reference sharding engine: ``fully_shard`` and ``replicate``, usable without the harness.

Read it in the order of its imports: policies, mesh, geometry and nested (values); torch_internals; parameter, shards
and unsharded (memory); collectives, division, lanes and reduction (communication); checks and group; tree, unit and
stepping (when things happen); module and composable (the front door); norm.
"""

from engine.reference.composable import fully_shard, register_fsdp_forward_method, replicate, share_comm_ctx
from engine.reference.module import FSDPModule, ReplicateModule, UnshardHandle
from engine.reference.norm import clip_grad_norm_
from engine.reference.policies import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
)

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReplicateModule",
    "ShardPlacementResult",
    "UnshardHandle",
    "clip_grad_norm_",
    "fully_shard",
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
]
