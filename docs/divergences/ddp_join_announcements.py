"""No announcement of join is waited for by the rank that makes it. Needs torch alone.

torch/distributed/algorithms/join.py, Join.notify_join_context: an asynchronous all-reduce, whose work is dropped
Run: torchrun --nproc-per-node 2 ddp_join_announcements.py
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import join
from torch.nn.parallel import DistributedDataParallel


class Watched(dist.Work):
    """A work that counts itself, and who waits for it."""

    made = waited_for = 0

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self.work = work
        Watched.made += 1

    def wait(self, *_: object) -> bool:
        """Wait."""
        Watched.waited_for += 1
        return self.work.wait()


# Train two batches on one rank and three on the other.
dist.init_process_group("gloo")
rank = dist.get_rank()
model, all_reduce = DistributedDataParallel(nn.Linear(4, 4)), dist.all_reduce


def _watched(*given: object, async_op: bool = False, **named: object) -> object:
    work = all_reduce(*given, async_op=async_op, **named)
    return Watched(work) if async_op else work


join.dist = SimpleNamespace(**{**vars(dist), "all_reduce": _watched})
with model.join():
    for _ in range(2 + rank):
        model(torch.ones(1, 4)).sum().backward()
print(f"rank {rank}: {Watched.made} announcements, {Watched.waited_for} of them waited for")
dist.destroy_process_group()
