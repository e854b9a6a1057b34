"""PyTorch-Ignite's ``auto_model`` and ``auto_optim``: DistributedDataParallel if there are several processes."""

from __future__ import annotations

import ignite.distributed as idist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardproof.engine.adapters.torch_ddp import BASICS
from shardproof.engine.contract import Capability, Copies, Engine, OptimizerFactory, Plan, PreparedModel


class PreparedIgnite(PreparedModel):
    """The wrapper is torch's; the optimizer passes through Ignite too."""

    copies = Copies.BUCKETS

    def optimizer(self, factory: OptimizerFactory) -> None:
        """Pass it to Ignite."""
        super().optimizer(lambda given: idist.auto_optim(factory(given)))


class IgniteDdpEngine(Engine):
    """Ignite's default for several processes on a CPU."""

    name = "ignite.ddp"
    package = "pytorch-ignite"
    known_as = "torch.ddp"
    needs_processes = True  # it stores rank and backend in a global
    preload = (__name__,)
    capabilities = BASICS

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Pass the options of DDP with the model."""
        plan.refuse_beyond(self.capabilities)
        wrapper = idist.auto_model(
            model,
            process_group=mesh.get_group(),
            bucket_cap_mb=None if plan.bucket_bytes is None else plan.bucket_bytes / 2**20,
            broadcast_buffers=Capability.OWN_BUFFERS not in plan.demands,
            find_unused_parameters=bool(plan.demands & {Capability.UNUSED, Capability.RANK_DEPENDENT}),
        )
        return PreparedIgnite(wrapper, named=model)
