"""Our own engine, judged like any other: each unit of the plan is one group, the root takes the rest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from engine.contract import Capability, Engine, Layout, Plan, PreparedModel, Reshard
from engine.reference import FSDPModule, MixedPrecisionPolicy, fully_shard, replicate


class PreparedReference(PreparedModel):
    """Modules keep their names; parameters are DTensors."""

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Keep gradients local on this rank."""
        assert isinstance(self.module, FSDPModule)
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)


class ReferenceEngine(Engine):
    """Shards, or replicates where the plan says so; both are one engine."""

    name = "reference"
    capabilities = frozenset(Capability)

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Shard or replicate every unit of the plan, then the root."""
        plan.refuse_beyond(self.capabilities)
        reshard = {Reshard.NATIVE: None, Reshard.AFTER_FORWARD: True, Reshard.KEEP: False}[plan.reshard]
        precision = MixedPrecisionPolicy(reduce_dtype=plan.reduce_dtype)
        for module in (*map(model.get_submodule, plan.units), model):
            if plan.layout is Layout.REPLICATE:
                replicate(module, mesh=mesh, mp_policy=precision)
            else:
                fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=precision)
        if plan.divide_factor is not None:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(plan.divide_factor)
        return PreparedReference(model)
