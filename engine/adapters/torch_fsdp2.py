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
        if plan.divide_factor is not None:
            num_shards = mesh.size(mesh.ndim - 1)
            set_divide_factor(model, plan.divide_factor, num_shards, mesh.device_type)
        return PreparedFullyShard(model)


def set_divide_factor(model: nn.Module, factor: float, num_shards: int, device_type: str) -> None:
    """Ask every unit of a model to divide by ``factor``; the setters reach one module each.

    For a factor other than the number of shards FSDP2 would reduce-scatter with PREMUL_SUM, which NCCL alone
    knows: on a CPU only plain sums, divided afterwards, do. With one shard nothing is scattered, nobody would
    be sent that op, and to ask for plain sums would bring on the double division that torch 2.13 makes there.
    """
    needs_plain_sums = device_type == "cpu" and num_shards not in {1, factor}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(needs_plain_sums)
