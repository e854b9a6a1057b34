"""torchft's DDP cannot train a reentrant checkpoint, though nothing goes unused. Needs torch and torchft.

torchft/ddp.py, DistributedDataParallel.__init__: find_unused_parameters=True, whatever the caller wants, under which
torch's reducer marks parameters anew in each backward inside a checkpoint. The same model under torch's DDP trains.
Run: torchrun --nproc-per-node 2 torchft_reentrant_checkpoint.py
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.ddp import DistributedDataParallel


class Model(nn.Module):
    """Two layers, the second of which is computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.second, self.first(rows), use_reentrant=True)


# Run a forward and a backward under torch's DDP, then under torchft's.
dist.init_process_group("gloo")
rank = dist.get_rank()
lighthouse = rank == 0 and LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=100)
address = [lighthouse and lighthouse.address()]
dist.broadcast_object_list(address, src=0)
own = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=20)), load_state_dict=lambda _: None, state_dict=dict,
    min_replica_size=2, use_async_quorum=False, init_sync=False, rank=0, world_size=1,
    store_addr="localhost", store_port=own.port, lighthouse_addr=address[0], replica_id=f"replica_{rank}",
)  # fmt: skip
manager.start_quorum()
for wrapped in (nn.parallel.DistributedDataParallel(Model()), DistributedDataParallel(manager, Model())):
    try:
        wrapped(torch.ones(1, 4)).sum().backward()
        message = "trains"
    except RuntimeError as error:
        message = str(error).partition(".")[0]
    print(f"{type(wrapped).__module__}, rank {rank}: {message}", flush=True)
dist.barrier()
os._exit(0)
