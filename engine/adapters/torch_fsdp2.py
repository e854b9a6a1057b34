"""torch.distributed.fsdp.fully_shard (FSDP2), on a 1-D mesh or a 2-D replicate-by-shard mesh."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from engine.contract import Capability, Engine, Plan, PreparedModel, Reshard


class PreparedFullyShard(PreparedModel):
    """FSDP2 swaps module classes in place and keeps names; parameters are DTensors."""

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Keep gradients local: FSDP2 has a flag where DDP has a context."""
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)


class FullyShardEngine(Engine):
    """Each unit is gathered before use and its gradients are reduce-scattered after backward."""

    name = "torch.fsdp2"
    capabilities = frozenset(set(Capability) - {Capability.REPLICATE})

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard every unit of the plan, then the root."""
        plan.refuse_beyond(self.capabilities)
        reshard = {Reshard.NATIVE: None, Reshard.AFTER_FORWARD: True, Reshard.KEEP: False}[plan.reshard]
        precision = MixedPrecisionPolicy(reduce_dtype=plan.reduce_dtype)
        for module in (*map(model.get_submodule, plan.units), model):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=precision)
        return PreparedFullyShard(model)
