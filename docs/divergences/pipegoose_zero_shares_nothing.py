"""pipegoose's ZeRO-1 shares no update with the other ranks. Needs torch and pipegoose.

pipegoose/optim/zero/optim.py, DistributedOptimizer.step: broadcasts what _flatten_dense_tensors makes of a rank's
parameters. Of two and more that is a copy: on the ranks that receive it nothing puts it back into parameters. Of one it
is a view, and of none, as where ranks are more than parameters, an error.
"""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pipegoose.distributed.parallel_context import ParallelContext
from pipegoose.nn.data_parallel.data_parallel import DataParallel
from pipegoose.optim.zero.optim import DistributedOptimizer
from torch import nn


def main(rank: int, num_layers: int) -> None:
    """Take one step, and name the parameters that it leaves as they were on this rank."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29611 + num_layers)}
    context = ParallelContext.from_torch(
        tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=2
    )
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(num_layers)))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model = DataParallel(model, context).parallelize()
    try:
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), context)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        stale = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
        print(f"{num_layers} parameters, rank {rank}: as before the step: {stale}", flush=True)
    except (RuntimeError, ValueError) as error:
        print(f"{num_layers} parameters, rank {rank}: {error}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for number in (2, 4, 1):
        mp.spawn(main, args=(number,), nprocs=2)
