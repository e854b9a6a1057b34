"""torchft's DDP leaves gradients unreduced that only some ranks have, and its pure DDP all. Needs torch and torchft.

torchft/ddp.py, DistributedDataParallel.__init__: a ProcessGroupDummy "to soak up the init all reduce" is also what the
reducer asks which parameters some rank used. PureDistributedDataParallel: post_grad_hook drops the work of allreduce.
Run: torchrun --nproc-per-node 2 torchft_gradients_of_some_ranks.py
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.ddp import DistributedDataParallel, PureDistributedDataParallel


class Chosen(nn.Module):
    """Two layers, of which forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.layers[which](x)


# Use another layer on each rank under the first, of gradients 2 and 4; the same one under the second.
dist.init_process_group("gloo")
rank = dist.get_rank()
for wrap in (DistributedDataParallel, PureDistributedDataParallel):
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
    chosen = Chosen()
    wrapped = wrap(manager, chosen)
    is_first = wrap is DistributedDataParallel
    which, averaged = (rank, [1.0, 2.0]) if is_first else (0, [3.0, None])
    wrapped(torch.full((1, 1), 2.0 + 2 * rank), which).sum().backward()
    time.sleep(1)
    found = [None if layer.weight.grad is None else layer.weight.grad.item() for layer in chosen.layers]
    print(f"{wrap.__name__}, rank {rank}: gradients {found}; averaged they are {averaged}", flush=True)
    dist.barrier()
os._exit(0)
