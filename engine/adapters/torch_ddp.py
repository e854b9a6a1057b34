"""torch.nn.parallel.DistributedDataParallel."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from engine.contract import Capability, Engine, Plan, PreparedModel


class PreparedDdp(PreparedModel):
    """DDP leaves the original module and its names in place."""

    def accumulating(self) -> AbstractContextManager[None]:
        """Use DDP's own no_sync."""
        assert isinstance(self.module, DistributedDataParallel)
        return self.module.no_sync()


class DistributedDataParallelEngine(Engine):
    """One all-reduce per bucket of gradients, started from the C++ reducer during backward."""

    name = "torch.ddp"
    capabilities = frozenset({Capability.REPLICATE, Capability.ACCUMULATE})

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Wrap the whole model; DDP buckets parameters itself, so ``plan.units`` does not apply."""
        plan.refuse_beyond(self.capabilities)
        return PreparedDdp(DistributedDataParallel(model, process_group=mesh.get_group()), named=model)
