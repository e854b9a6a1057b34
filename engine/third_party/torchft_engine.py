"""torchft's DistributedDataParallel, in its two kinds: each rank is a replica group of its own, behind a manager."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.ddp import DistributedDataParallel, PureDistributedDataParallel
from torchft.optim import OptimizerWrapper

from shardproof.engine.contract import Capability, Copies, Engine, OptimizerFactory, Plan, PreparedModel

_LIMIT = timedelta(seconds=30)


def _join(rank: int, size: int) -> Manager:
    """Join the quorum of all ranks, for which the first one keeps the lighthouse."""
    lighthouse = (
        LighthouseServer(bind="[::]:0", min_replicas=size, join_timeout_ms=100) if rank == 0 else None
    )
    address = [lighthouse.address() if lighthouse else None]
    dist.broadcast_object_list(address, src=0)
    c10d: Any = dist  # its stubs lack the store
    store = c10d.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    limits = {"timeout": _LIMIT, "quorum_timeout": _LIMIT, "connect_timeout": _LIMIT}
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_LIMIT),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=size,
        use_async_quorum=False,
        init_sync=False,  # the harness gives every rank the same model
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=address[0],
        replica_id=f"replica_{rank}",
        **limits,
    )
    manager.kept_alive = lighthouse, store
    return manager


class PreparedTorchft(PreparedModel):
    """A step is taken where the quorum agrees on it."""

    copies = Copies.BUCKETS

    def __init__(self, manager: Manager, module: nn.Module, model: nn.Module) -> None:
        super().__init__(module, named=model)
        self._manager = manager

    def optimizer(self, factory: OptimizerFactory) -> None:
        """Wrap it; a quorum is begun by `zero_grad`, which the first step does without."""
        super().optimizer(lambda parameters: OptimizerWrapper(self._manager, factory(parameters)))
        self._manager.start_quorum()


class TorchftDdpEngine(Engine):
    """torch's DDP, whose buckets are reduced by the manager."""

    name = "torchft.ddp"
    package = "torchft"
    needs_processes = True
    capabilities = frozenset(
        {
            Capability.REPLICATE,
            Capability.ACCUMULATE,
            Capability.CLIP,
            Capability.UNUSED,
            Capability.RANK_DEPENDENT,  # it sets find_unused_parameters by itself
        }
    )
    wrap: ClassVar[type[nn.Module]] = DistributedDataParallel

    def prepare(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> PreparedModel:
        """Make every rank a replica."""
        plan.refuse_beyond(self.capabilities)
        manager = _join(dist.get_rank(), dist.get_world_size())
        return PreparedTorchft(manager, self.wrap(manager, model), model)


class TorchftPureDdpEngine(TorchftDdpEngine):
    """A hook on each parameter, which has its gradient reduced by itself."""

    name = "torchft.pure_ddp"
    capabilities = frozenset({Capability.REPLICATE, Capability.CLIP, Capability.UNUSED})
    wrap = PureDistributedDataParallel
