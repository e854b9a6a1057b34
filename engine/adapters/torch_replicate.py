"""torch.distributed._composable.replicate_with_fsdp: replication on FSDP2's machinery."""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.composable import DECIDED_BY, apply_plan
from shardproof.engine.adapters.torch_fsdp2 import CAPABILITIES, FSDP2_API, PreparedFullyShard
from shardproof.engine.adapters.torch_internals import torch_replicate
from shardproof.engine.contract import Capability, Engine, Layout, Plan, PreparedModel

torch_replicate()  # raises at import, before any case, if torch lacks it

_NOT_OF_REPLICAS = {
    Capability.SHARD,
    Capability.HYBRID,
    Capability.SHARD_DIM,
    Capability.EXPERTS,
    Capability.RESHARD_POLICY,
    Capability.RESHARD_PART,
    Capability.MIXED,
    Capability.REPLICA_SYNC,
    Capability.GATHER_ONCE,
    Capability.COMPOSABLE,  # tested with torch.fsdp2, which has both functions
    Capability.GRAPHS,  # torch promises them only for fully_shard
}


class ReplicateEngine(Engine):
    """Replicates parameters as DTensors and all-reduces each unit's gradients once."""

    name = "torch.replicate"
    capabilities = CAPABILITIES - _NOT_OF_REPLICAS
    prepared_type: ClassVar[type[PreparedFullyShard]] = PreparedFullyShard
    call = torch_replicate()
    decided_by = DECIDED_BY

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        plan.refuse_beyond(self.capabilities)
        apply_plan(FSDP2_API, model, plan, mesh, Layout.REPLICATE, self.call_options)
        return self.adopt(model, model, plan)

    def adopt(self, module: nn.Module, model: nn.Module, plan: Plan) -> PreparedModel:
        return self.prepared_type(model, plan)
